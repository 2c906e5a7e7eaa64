"""Samples of a prompt take turns at the two roles."""

import asyncio
from typing import Any

import pytest

from mcore_rl.agents.environments.code_env import CureEnvironment, CureOptions

TASK = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "problem"}]}


def play(options: CureOptions, sample_index: int) -> tuple[str, float]:
    """Return (what the policy is asked, is_test)."""

    async def episode() -> tuple[str, float]:
        environment = CureEnvironment(options)
        start = await environment.reset({**TASK, "sample_index": sample_index})
        assert start.messages[0] == TASK["messages"][0]
        step = await environment.step({"role": "assistant", "content": "x"})
        assert step.done and step.reward == 0.0
        return start.messages[-1]["content"], start.metrics["is_test"]

    return asyncio.run(episode())


def test_every_second_sample_writes_a_test() -> None:
    options = CureOptions(test_text="test : ")
    assert [play(options, i) for i in range(3)] == [
        ("problem", 0.0),
        ("test : problem", 1.0),
        ("problem", 0.0),
    ]


def test_fewer_tests_than_programs() -> None:
    roles = [play(CureOptions(test_every=4, program_text="write: "), i) for i in range(4)]
    assert [is_test for _, is_test in roles] == [0.0, 0.0, 0.0, 1.0]
    assert roles[0][0] == "write: problem"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test_every": 1}, "test_every is 1"),
        ({"test_text": ""}, "could not tell its roles apart"),
    ],
)
def test_options_without_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CureOptions(**options)
