"""Lets a policy write a program and repair it, or write programs and unit tests for them.

code   problem --> program --public tests--> done, rewarded by hidden tests
                      ^            |
                      +- repair <- what the first failed test gave
cure   some samples of a prompt write a program, the others a unit test; one answer ends an episode

The reward of `cure` is computed with the whole group, by a reward function that reads `is_test`
among the episode's numbers (recipes/rewards/cure.py).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mcore_rl.agents.environments.environment import Message, Start, Step
from mcore_rl.rewards.code.languages import PROGRAM_LANGUAGES
from mcore_rl.rewards.code.trials import Trial, make_trial
from mcore_rl.tasks.code_steps import STEPS

SMALL_LANGUAGES = {"steps": STEPS}
LANGUAGES = (*SMALL_LANGUAGES, *PROGRAM_LANGUAGES)


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


@dataclass(frozen=True)
class CodeOptions:
    """How programs are written and rewarded.

    language         steps: see tasks/code_steps.py; else the answer's last fenced block is a
                     program in python, cpp or another language of the sandbox
    attempts         programs that the policy may write in an episode
    repair_discount  the reward is multiplied by this for each attempt after the first
    reward           all: 1 if every hidden test passes, else 0; share: the share that passes
    sandbox_url      a server on which programs run; empty: the run's, or else the sandbox of the
                     environment's worker
    """

    language: str = "python"
    attempts: int = 2
    repair_discount: float = 0.9
    reward: str = "all"
    sandbox_url: str = ""

    def __post_init__(self) -> None:
        if self.language not in LANGUAGES:
            raise ValueError(f"language is {self.language!r}: one of {', '.join(LANGUAGES)}")
        if self.attempts < 1 or not 0 <= self.repair_discount <= 1:
            raise ValueError(
                f"attempts is {self.attempts}, repair_discount {self.repair_discount}: at least 1,"
                " and from 0 to 1"
            )
        if self.reward not in ("all", "share"):
            raise ValueError(f"reward is {self.reward!r}: all or share")


@dataclass
class CodeEnvironment:
    """One episode: a problem and the attempts at it."""

    options: CodeOptions
    _trial: Trial | None = None
    _num_attempts: int = 0
    _metrics: dict[str, float] = field(default_factory=dict)

    async def reset(self, task: Mapping[str, Any]) -> Start:
        """Begin a problem. Raises ValueError if its ground truth has no tests."""
        truth = task["ground_truth"]
        truth = json.loads(truth) if isinstance(truth, str) else truth
        name = self.options.language
        self._trial = make_trial(SMALL_LANGUAGES.get(name, name), truth, self.options.sandbox_url)
        return Start(list(task["messages"]))

    async def step(self, message: Message) -> Step:
        """Try a program on the public tests, and on the hidden ones if it is the last attempt."""
        assert self._trial is not None, "reset comes first"
        self._num_attempts += 1
        verdict = await self._trial.run(str(message.get("content") or ""))
        if self._num_attempts == 1:
            self._metrics["first_passes_public"] = float(verdict.passes_public)
        if not verdict.passes_public and self._num_attempts < self.options.attempts:
            return Step(
                messages=[{"role": "user", "content": verdict.feedback}], metrics=self._metrics
            )
        hidden = await self._trial.run_hidden(verdict)
        share = sum(hidden) / len(hidden)
        worth = float(all(hidden)) if self.options.reward == "all" else share
        self._metrics |= {"attempts": float(self._num_attempts), "solved": float(all(hidden))}
        discount = self.options.repair_discount ** (self._num_attempts - 1)
        return Step(reward=worth * discount, done=True, metrics=self._metrics)

    async def close(self) -> None:
        self._trial = None
