"""Lets a policy search by tags in its text, as Search-R1 has it.

policy        <search> query </search>
environment   <information> passages </information>
policy        <answer> text </answer>, which ends the episode

The first pair of tags in an answer counts. What an episode is worth: the score of its answer,
`format_score` for a wrong one, less the penalties.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_rl.agents.environments.environment import Message, Start, Step, text_of, with_text
from mcore_rl.agents.environments.search_options import (
    Searcher,
    SearchOptions,
    check_information,
    check_score,
)
from mcore_rl.agents.environments.search_rewards import best_score

INSTRUCTIONS = """\
You may search before you answer: write <search> query </search>, and you are told what was found \
between <information> and </information>. Search as often as you need. Give the final answer, and \
nothing but it, as <answer> text </answer>."""
TOLD_INVALID = (
    "Nothing was done: write one <search> query </search>, or <answer> text </answer> to finish."
)
_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True)
class SearchTagsOptions(SearchOptions):
    """How episodes go and what they are worth; url and passages as in SearchOptions.

    instructions     said after the task's messages
    information      what the policy is told after a search, around {passages}
    shows_passages   false: {passages} stay empty, to see what a policy can do without them
    role             who says it to the policy: user or tool
    max_searches     a further one ends the episode; 0: any number
    max_invalid      answers without a pair of tags that are told of it; the next ends the episode
    told_invalid     what they are told
    score            em, f1 or contains
    format_score     of an answer that is wrong
    invalid_penalty  for each answer without a pair of tags
    rest_penalty     for each answer with text after its pair of tags
    """

    instructions: str = INSTRUCTIONS
    information: str = "\n\n<information>{passages}</information>\n\n"
    shows_passages: bool = True
    role: str = "user"
    max_searches: int = 0
    max_invalid: int = 2
    told_invalid: str = TOLD_INVALID
    score: str = "em"
    format_score: float = 0.0
    invalid_penalty: float = 0.0
    rest_penalty: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_score(self.score)
        check_information(self.information)
        if self.role not in ("user", "tool"):
            raise ValueError(f"role is {self.role!r}: user or tool")
        if self.max_searches < 0 or self.max_invalid < 0:
            raise ValueError(
                f"max_searches is {self.max_searches}, max_invalid {self.max_invalid}: at least 0"
            )
        for name in ("invalid_penalty", "rest_penalty"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"{name} is {getattr(self, name)}: at least 0, as it is subtracted"
                )


@dataclass(frozen=True)
class Action:
    """The wish of a policy: search, answer, or nothing that can be done (empty kind).

    has_rest   whether text follows the pair of tags
    """

    kind: str
    content: str = ""
    has_rest: bool = False


def action_of(text: str) -> Action:
    """Return the action of an answer: its first pair of tags."""
    found = _ACTION.search(text)
    if found is None:
        return Action("")
    return Action(found[1], found[2].strip(), bool(text[found.end() :].strip()))


class SearchTagsEnvironment:
    """One episode; its methods run in a thread of their own, where they may wait for the server."""

    def __init__(self, options: SearchTagsOptions) -> None:
        self._options = options
        self._searcher = Searcher(options)
        self._truth: Any = None
        self._num_invalid = 0
        self._num_rests = 0

    def reset(self, task: Mapping[str, Any]) -> Start:
        self._truth = task.get("ground_truth")
        return Start(with_text(task.get("messages") or (), self._options.instructions))

    def step(self, message: Message) -> Step:
        """Search, or end the episode. Raises SearchUnavailableError if the server stays away."""
        options = self._options
        action = action_of(text_of(message))
        penalty = options.rest_penalty if action.has_rest else 0.0
        self._num_rests += action.has_rest
        if action.kind == "answer":
            score = best_score(options.score, action.content, self._truth)
            reward = score if score else options.format_score
            metrics = {**self._metrics(), "right": float(score == 1.0)}
            return Step(reward=reward - penalty, done=True, metrics=metrics)
        if action.kind == "search":
            if self._searcher.num_searches == options.max_searches > 0:
                return Step([], -penalty, True, self._metrics(), "max_turns")
            return self._told(self._information(action.content), -penalty)
        self._num_invalid += 1
        if self._num_invalid > options.max_invalid:
            return Step([], -options.invalid_penalty, True, self._metrics(), "parse_error")
        return self._told(options.told_invalid, -options.invalid_penalty)

    def close(self) -> None:
        pass

    def _information(self, query: str) -> str:
        passages = self._searcher.show(query)
        shown = passages if self._options.shows_passages else ""
        return self._options.information.format(passages=shown)

    def _told(self, text: str, reward: float) -> Step:
        message = {"role": self._options.role, "content": text}
        return Step([message], reward, metrics=self._metrics())

    def _metrics(self) -> dict[str, float]:
        return {
            **self._searcher.metrics,
            "invalid": float(self._num_invalid),
            "rests": float(self._num_rests),
        }
