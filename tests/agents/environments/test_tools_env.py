"""Python functions as tools of an episode in a worker."""

import asyncio
import json

import pytest

from mcore_rl.agents.environments.pool import EnvironmentPool
from mcore_rl.agents.environments.tools_env import ToolsOptions
from mcore_rl.agents.environments.worker_process import EnvironmentOptions
from tests.agents.environments import toolbox

TASK = {
    "messages": [{"role": "user", "content": "What is 2 + 3?"}],
    "index": 3,
    "ground_truth": 5,
    "data_source": "sums",
}


def named(*names):
    return [f"{toolbox.HERE}:{name}" for name in names]


def calls(*pairs):
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for number, (name, arguments) in enumerate(pairs)
        ],
    }


def play(options, *answers):
    async def run():
        async with EnvironmentPool(EnvironmentOptions("tools", options, workers=1)) as pool:
            episode = await pool.open(TASK)
            steps = [await episode.step(answer) for answer in answers]
            await episode.close()
            return episode.start, steps

    return asyncio.run(run())


def test_calls_are_answered_and_the_last_answer_is_rewarded():
    start, (first, last) = play(
        {"functions": named("add"), "reward": f"{toolbox.HERE}:reward", "instructions": "Use add."},
        calls(("add", {"first": 2, "second": 3}), ("add", {"first": 4}), ("add", {"third": 1})),
        {"role": "assistant", "content": "5"},
    )
    assert [tool["function"]["name"] for tool in start.tools] == ["add"]
    assert start.messages == [{"role": "user", "content": "What is 2 + 3?\n\nUse add."}]
    assert [message["content"] for message in first.messages[:2]] == ["5", "5"]
    assert first.messages[2]["content"].startswith("Error: TypeError: add() got an unexpected")
    assert not first.done and first.reward == 0
    assert last.done and last.messages == [] and last.end_reason == ""
    assert last.reward == pytest.approx(1.06)
    assert last.metrics["tools/add/calls"] == 3 and last.metrics["tools/add/failures"] == 1
    assert last.metrics["turns"] == 2


def test_tools_have_the_task_and_a_state_of_their_episode_and_run_at_once():
    _, (first, second) = play(
        {"functions": named("wait", "meet", "come", "long", "fail"), "result_len": 20},
        calls(
            ("wait", {"seconds": 0.1}),
            ("meet", {}),
            ("meet", {}),
            ("long", {"kind": "x"}),
            ("fail", {"reason": "lost"}),
            ("long", {"kind": "x", "_task": {}}),
            ("come", {}),
        ),
        calls(("wait", {"seconds": 0})),
    )
    texts = [message["content"] for message in first.messages]
    assert texts[:3] == ["waited 1 times", "met", "met"]
    assert texts[6] == "came"
    assert texts[3] == f"{'x' * 10}\n[81 characters left out]\n{'x' * 9}3"
    assert texts[4].endswith(": 'lost'") or texts[4].endswith(": lost")
    assert texts[5].endswith("no _task")
    assert second.messages[0]["content"] == "waited 2 times"


def test_a_tool_that_takes_too_long_is_told_and_the_episode_goes_on():
    _, (first, second) = play(
        {"functions": named("block", "wait"), "tool_timeout_s": 0.3},
        calls(("block", {"seconds": 30}), ("wait", {"seconds": 30})),
        {"role": "assistant", "content": "never mind"},
    )
    assert [message["content"] for message in first.messages] == [
        "Error: block took more than 0.3 s",
        "Error: wait took more than 0.3 s",
    ]
    assert second.done


def test_the_last_turn_is_rewarded_although_it_calls():
    _, (step,) = play(
        {"functions": named("add"), "reward": f"{toolbox.HERE}:reward", "max_turns": 1},
        calls(("add", {"first": 4})),
    )
    assert step.done and step.end_reason == "max_turns"
    assert step.reward == pytest.approx(1.03), "the tool's message is the last"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"functions": []}, r"functions is \[\]: a list of"),
        ({"functions": "a.py:b"}, "functions is 'a.py:b': a list of"),
        ({"functions": named("nothing")}, "has no 'nothing'"),
        ({"functions": named("untyped")}, "needs a type hint"),
        ({"functions": named("add", "add")}, "two tools share a name"),
        ({"functions": named("add"), "reward": "no/file.py:r"}, "there is no file"),
        ({"functions": named("add"), "tool_timeout_s": 0}, "tool_timeout_s is 0"),
    ],
)
def test_senseless_options_are_named(given, text):
    with pytest.raises(ValueError, match=text):
        ToolsOptions(**given)
