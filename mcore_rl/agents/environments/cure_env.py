"""Asks for a program in some samples of a prompt, and for a unit test in the others.

One answer ends an episode. Its reward is computed with the whole group, by a reward function that
reads `is_test` among the episode's numbers (recipes/rewards/cure.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_rl.agents.environments.environment import Message, Start, Step


@dataclass(frozen=True)
class CureOptions:
    """How the two roles are given to samples.

    test_every    of so many samples of a prompt, the last writes a unit test, the others programs
    program_text  said before the problem to who writes a program
    test_text     said before the problem to who writes a unit test
    """

    test_every: int = 2
    program_text: str = ""
    test_text: str = (
        "Write one unit test for a program that solves this problem, as two fenced blocks: first"
        " its standard input, then what it must print.\n\n"
    )

    def __post_init__(self) -> None:
        if self.test_every < 2:
            raise ValueError(
                f"test_every is {self.test_every}: of 2 samples or more, one writes a unit test"
            )
        if self.test_text == self.program_text:
            raise ValueError(
                f"test_text and program_text are both {self.test_text!r}: the policy"
                " could not tell its roles apart"
            )


class CureEnvironment:
    """One episode: a problem and one answer to it, a program or a unit test."""

    def __init__(self, options: CureOptions) -> None:
        self._options = options

    async def reset(self, task: Mapping[str, Any]) -> Start:
        every = self._options.test_every
        is_test = task["sample_index"] % every == every - 1
        text = self._options.test_text if is_test else self._options.program_text
        *before, problem = task["messages"]
        messages = [*before, {**problem, "content": f"{text}{problem['content']}"}]
        # Said at once: an answer that is cut off may end the episode before its first step.
        return Start(messages, metrics={"is_test": float(is_test)})

    async def step(self, message: Message) -> Step:
        return Step(done=True)

    async def close(self) -> None:
        pass
