"""A server on the unchanged package openenv is started by a worker, and played by text."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.agents.environments import openenv_env
from mcore_rl.agents.environments.environment import EnvironmentFailedError
from mcore_rl.agents.environments.openenv_env import OpenEnvEnvironment, OpenEnvOptions
from mcore_rl.agents.environments.pool import EnvironmentPool
from mcore_rl.agents.environments.worker_process import EnvironmentOptions
from tests.agents.environments.foreign import PYTHON, needs_agents_venv, play

SERVER = str(Path(__file__).with_name("openenv_server.py"))
COMMAND = [PYTHON, SERVER, "{port}"]
TASK = {"messages": [], "index": 0, "seed": 3}


@needs_agents_venv()
def test_answers_become_actions_and_observations_text():
    options = {"command": COMMAND, "observation": "{hint}!", "instructions": "Guess a number."}
    start, steps = play("openenv", options, TASK, ["2", "3"])
    assert start.messages == [{"role": "user", "content": "Guess a number.\n\nguess!"}]
    assert steps[0].messages == [{"role": "user", "content": "not 2!"}]
    assert [step.reward for step in steps] == [0.0, 1.0] and steps[1].done
    assert steps[1].metrics == {"steps": 2, "parse_errors": 0}


@pytest.mark.slow
@needs_agents_venv()
def test_answers_may_be_json_and_the_task_has_arguments_of_reset():
    options = {"command": COMMAND, "action_is_json": True, "parse_penalty": 0.5}
    task = {**TASK, "extra_info": {"reset": {"secret": "x"}}}
    _, steps = play("openenv", options, task, ["x", '{"message"}', 'I say {"message": "x"}.'])
    assert [step.reward for step in steps] == [-0.5, -0.5, 1.0]
    _, steps = play("openenv", {**options, "max_parse_errors": 1}, task, ["x"])
    assert steps[0].done and steps[0].end_reason == "parse_error"
    _, steps = play("openenv", options, task, ['{"message": 3, "guess": "x"}', '{"message": "x"}'])
    assert [step.reward for step in steps] == [-0.5, 1.0]
    refused = "message: Input should be a valid string; guess: Extra inputs are not permitted"
    told = f"This answer has no action: its fields are refused: {refused}"
    assert steps[0].messages == [{"role": "user", "content": told}]


class Refusing:
    """A session of a server that refuses the field `place` of every action, as openenv does."""

    def __init__(self, place: str, kind: str) -> None:
        problem = {"type": kind, "loc": [place], "msg": "it is wrong", "input": {}}
        data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": [problem]}
        self.reply = json.dumps({"type": "error", "data": data})

    async def send(self, text: str) -> None: ...

    async def recv(self) -> str:
        return self.reply


def step_refused(answer: str, place: str, kind: str, **options: Any):
    environment = OpenEnvEnvironment(OpenEnvOptions("http://a", parse_penalty=0.5, **options))
    environment._session = Refusing(place, kind)
    return asyncio.run(environment.step({"role": "assistant", "content": answer}))


JSON = {"action_is_json": True, "action": {"player": "me"}}
TYPED = {"action": {"move": "{answer}", "player": "me"}}


@pytest.mark.parametrize(
    ("answer", "place", "kind", "options"),
    [
        ("{}", "move", "missing", JSON),
        ('{"go": 3}', "go", "extra_forbidden", JSON),
        ("north", "move", "int_parsing", TYPED),
    ],
)
def test_fields_that_the_server_refuses_are_no_action(answer, place, kind, options):
    step = step_refused(answer, place, kind, **options)
    assert step.reward == -0.5 and not step.done and step.metrics["parse_errors"] == 1
    told = f"This answer has no action: its fields are refused: {place}: it is wrong"
    assert step.messages == [{"role": "user", "content": told}]
    last = step_refused(answer, place, kind, max_parse_errors=1, **options)
    assert (last.done, last.reward, last.end_reason) == (True, -0.5, "parse_error")


@pytest.mark.parametrize(
    ("place", "kind", "options"),
    [
        ("player", "literal_error", JSON),
        ("player", "literal_error", TYPED),
        ("move", "extra_forbidden", TYPED),
        ("step", "missing", TYPED),
    ],
)
def test_fields_that_the_options_give_are_not_the_policys_fault(place, kind, options):
    with pytest.raises(RuntimeError, match=r"answers step by error: .*it is wrong"):
        step_refused("{}", place, kind, **options)


def test_json_that_is_too_deep_is_no_action():
    deep = f'{{"move": {"[" * 100_000}}}'
    assert step_refused(deep, "move", "list_type", **JSON).metrics["parse_errors"] == 1


@needs_agents_venv()
def test_the_episodes_of_a_worker_are_sessions_of_one_server():
    async def run():
        given = EnvironmentOptions("openenv", {"command": COMMAND}, python=PYTHON, workers=1)
        async with EnvironmentPool(given) as pool:
            opened = await asyncio.gather(*(pool.open({**TASK, "seed": n}) for n in range(4)))
            answers = [{"content": str(n)} for n in range(4)]
            pairs = zip(opened, answers, strict=True)
            return await asyncio.gather(*(each.step(answer) for each, answer in pairs))

    assert [step.reward for step in asyncio.run(run())] == [1.0] * 4


def test_a_server_that_ended_is_started_again(monkeypatch):
    monkeypatch.setattr(openenv_env, "_servers", {})
    serve = "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
    command = (sys.executable, "-c", f"{serve}while True: s.accept()", "{port}")

    async def run():
        urls = [await openenv_env._start_server(command, 30.0) for _ in range(2)]
        first = openenv_env._servers[command].result().process
        first.kill()
        await first.wait()
        starts = (openenv_env._start_server(command, 30.0) for _ in range(2))
        urls += await asyncio.gather(*starts)
        second = openenv_env._servers[command].result().process
        is_running = second.returncode is None
        second.kill()
        await second.wait()
        return urls, is_running, first.pid != second.pid

    (one, again, *others), is_running, differ = asyncio.run(run())
    assert one == again and len(set(others)) == 1
    assert is_running and differ


@needs_agents_venv()
@pytest.mark.parametrize(
    ("options", "answers", "text"),
    [
        ({"url": "http://127.0.0.1:9"}, [], "ws://127.0.0.1:9/ws gives no session"),
        ({"command": ["false", "{port}"]}, [], "ended with status 1"),
        (
            {"command": ["sleep", "60{port}"], "connect_timeout_s": 1},
            [],
            r"did not listen at port \d+ within 1 s",
        ),
        ({"command": COMMAND, "action": {"guess": "1"}}, ["1"], "answers step by error"),
        pytest.param(
            *({"command": COMMAND, "observation": "{board}"}, []),
            "asks for 'board': the server's has",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_goes_wrong_is_named(options, answers, text):
    with pytest.raises(EnvironmentFailedError, match=text):
        play("openenv", options, TASK, answers)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "give one of them"),
        ({"url": "http://a", "command": ["b", "{port}"]}, "give one of them"),
        ({"command": "serve {port}"}, "as a list"),
        ({"command": ["serve"]}, "does not use {port}"),
        ({"url": "http://a", "max_parse_errors": 0}, "max_parse_errors is 0"),
    ],
)
def test_senseless_options_are_named(given, text):
    with pytest.raises(ValueError, match=text):
        OpenEnvOptions(**given)
