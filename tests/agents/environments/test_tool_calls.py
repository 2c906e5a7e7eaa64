"""Calls run at once; whatever goes wrong becomes a message for the policy."""

import asyncio

import pytest

from mcore_rl.agents.environments.environment import ToolUnavailableError
from mcore_rl.agents.environments.tools_env import ToolCalls, ToolOutcome
from mcore_rl.services.sandbox.limits import SandboxError
from mcore_rl.services.search.client import SearchUnavailableError


def call(name, arguments="{}", number=0):
    return {"id": f"call_{number}", "function": {"name": name, "arguments": arguments}}


async def use(name, arguments):
    if name == "fail":
        raise LookupError("not there")
    await asyncio.sleep(arguments.get("seconds", 0))
    return ToolOutcome(arguments.get("text", "ok"), reward=0.5)


def run(*calls, most_len=0):
    tools = ToolCalls(use, ["say", "fail"], timeout_s=0.5, most_len=most_len)
    messages, reward = asyncio.run(tools.run({"role": "assistant", "tool_calls": list(calls)}))
    return [message["content"] for message in messages], reward, tools.metrics


def test_answers_come_in_the_order_of_the_calls_and_rewards_add_up():
    tools = ToolCalls(use, ["say"], 5, 0)
    calls = [call("say", '{"seconds": 0.2, "text": "a"}', 1), call("say", '{"text": "b"}', 2)]
    messages, reward = asyncio.run(tools.run({"tool_calls": calls}))
    assert messages == [
        {"role": "tool", "tool_call_id": "call_1", "name": "say", "content": "a"},
        {"role": "tool", "tool_call_id": "call_2", "name": "say", "content": "b"},
    ]
    assert reward == 1.0
    assert asyncio.run(tools.run({"content": "no calls"})) == ([], 0)


def test_what_goes_wrong_is_told_and_counted():
    texts, reward, metrics = run(
        call("fail"),
        call("say", "{"),
        call("say", "[1]"),
        call("shout"),
        call("say", '{"seconds": 9}'),
    )
    assert texts[0] == "Error: LookupError: not there"
    assert texts[1].startswith("Error: the arguments are not JSON: ")
    assert texts[2] == "Error: the arguments are not a JSON object"
    assert texts[3] == "Error: there is no tool shout; there are: say, fail"
    assert texts[4] == "Error: say took more than 0.5 s"
    assert reward == 0
    assert metrics["tools/calls"] == metrics["tools/failures"] == 5
    assert metrics["tools/say/calls"] == 3 and metrics["tools/unknown/failures"] == 1
    assert 0.5 <= metrics["tools/seconds"] < 2.0


@pytest.mark.parametrize("error", [ToolUnavailableError, SearchUnavailableError, SandboxError])
def test_a_tool_that_cannot_work_is_not_told_to_the_policy(error):
    async def use_nothing(name, arguments):
        raise error("the service is away")

    tools = ToolCalls(use_nothing, ["say"], timeout_s=0.5, most_len=0)
    with pytest.raises(error, match="the service is away"):
        asyncio.run(tools.run({"tool_calls": [call("say")]}))


def test_long_results_are_cut_with_a_note():
    texts, _, _ = run(call("say", '{"text": "abcdefghij"}'), most_len=4)
    assert texts == ["ab\n[6 characters left out]\nij"]
