"""Conversations of several turns, with which a chat template is tried before the first episode."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mcore_rl.agents.chat.template import trial_call
from mcore_rl.agents.messages import Message

_MOST_TURNS = 7


@dataclass(frozen=True)
class TrialTalk:
    """A conversation that ends with an answer, and the messages that follow it."""

    history: list[Message]
    new: list[Message]


@dataclass(frozen=True)
class _Kind:
    """The parts of an answer, and whether the user speaks after the results of its calls."""

    has_reasoning: bool
    has_content: bool
    num_calls: int
    user_follows: bool


def trial_talks(number: int, seed: int = 0) -> Iterator[TrialTalk]:
    """Yield random conversations; each repeats up to three kinds of turns."""
    generator = random.Random(seed)
    for _ in range(number):
        kinds = [_draw_kind(generator) for _ in range(generator.randint(1, 3))]
        yield _talk(generator, kinds)


def _draw_kind(generator: random.Random) -> _Kind:
    num_calls = generator.choice((0, 0, 1, 1, 2))
    return _Kind(
        has_reasoning=generator.random() < 0.5,
        has_content=not num_calls or generator.random() < 0.5,
        num_calls=num_calls,
        user_follows=not num_calls or generator.random() < 0.25,
    )


def _talk(generator: random.Random, kinds: list[_Kind]) -> TrialTalk:
    history: list[Message] = []
    if generator.random() < 0.5:
        history.append({"role": "system", "content": "Be brief."})
    new: list[Message] = [{"role": "user", "content": "Question first."}]
    for number in range(generator.randint(3, _MOST_TURNS)):
        history += new
        answer, new = _turn(generator.choice(kinds), number)
        history.append(answer)
    return TrialTalk(history, new)


def _turn(kind: _Kind, number: int) -> tuple[Message, list[Message]]:
    answer: dict[str, Any] = {"role": "assistant", "content": ""}
    if kind.has_content:
        answer["content"] = f"Text {number}."
    if kind.has_reasoning:
        answer["reasoning_content"] = f"Thought {number}."
    new: list[Message] = []
    for i in range(kind.num_calls):
        call_id = f"call{number:03}{i:02}"
        answer.setdefault("tool_calls", []).append(trial_call(call_id, f"value {number} {i}"))
        result = f"result {number} {i}"
        new.append({"role": "tool", "tool_call_id": call_id, "content": result})
    if kind.user_follows:
        new.append({"role": "user", "content": f"Question {number}."})
    return answer, new
