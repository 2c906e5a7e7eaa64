"""A host calls environments, and hands on whatever comes of it."""

import asyncio

import pytest

from mcore_rl.agents.environments.worker import Host, describe
from tests.agents.environments.pools import COROUTINES, COUNTDOWN


def calls(kind, *requests, options=None):
    async def run():
        host = Host(kind, options or {})
        return [await host.call({"episode": 1, **request}) for request in requests]

    return asyncio.run(run())


RESET = {"do": "reset", "task": {"index": 3}}


def step(text):
    return {"do": "step", "message": {"content": text}}


def test_an_episode_is_reset_stepped_and_closed():
    start, first, closed, again = calls(
        COUNTDOWN, RESET, step("go"), {"do": "close"}, {"do": "close"}, options={"turns": 1}
    )
    messages = [{"role": "user", "content": "task 3"}]
    assert start == {"value": {"messages": messages, "tools": [], "metrics": {}}}
    assert first["value"]["done"] and first["value"]["reward"] == 1.0
    assert closed == again == {"value": None}


def test_errors_are_values_with_a_traceback():
    _, failed, unknown = calls(COUNTDOWN, RESET, step("RAISE"), {**step("go"), "episode": 2})
    assert failed["error"]["kind"] == "RuntimeError" and "dragon" in failed["error"]["traceback"]
    assert unknown["error"]["kind"] == "KeyError"


def test_a_class_without_options_of_that_name_fails_when_it_is_made():
    (failed,) = calls(COUNTDOWN, RESET, options={"turn": 1})
    assert failed["error"]["kind"] == "TypeError"
    with pytest.raises(ValueError, match="no environment of kind 'chess'"):
        Host("chess", {})


@pytest.mark.parametrize(
    ("kind", "text", "leaves_thread"), [(COUNTDOWN, "SLEEP 3", True), (COROUTINES, "60", False)]
)
def test_an_abandoned_call_ends_unless_it_is_in_a_thread(kind, text, leaves_thread):
    async def run():
        host = Host(kind, {})
        await host.call({"episode": 1, **RESET})
        waiting = asyncio.ensure_future(host.call({"episode": 1, **step(text)}))
        await asyncio.sleep(0.2)
        assert host.abandon(1) == leaves_thread
        assert host.abandon(1) is False
        return await asyncio.wait_for(waiting, 1.0)

    assert asyncio.run(run())["error"]["kind"] == "CancelledError"


def test_a_description_is_bounded():
    try:
        raise ValueError("x" * 10_000)
    except ValueError as error:
        assert len(describe(error)["traceback"]) == 4000
