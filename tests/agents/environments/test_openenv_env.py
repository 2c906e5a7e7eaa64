"""A server on the unchanged package openenv is started by a worker, and played by text."""

import asyncio
from pathlib import Path

import pytest

from mcore_rl.agents.environments.environment import EnvironmentFailedError
from mcore_rl.agents.environments.openenv_env import OpenEnvOptions
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
