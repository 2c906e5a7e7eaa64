"""Random conversations with tools, whose parts carry words that occur only once."""

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from mcore_rl.agents.messages import Message, Tool

TOOLS: list[Tool] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
        },
    }
    for name in ("look", "go")
]
FREE_TEXT = st.text("ab c\n'\"\\{}é漢🙂", max_size=8)


@dataclass(frozen=True)
class Turn:
    """An answer and the messages that follow it.

    words    one for each part of the answer: reasoning, content, calls
    ending   number of the stop token that was sampled last; None: the answer was cut off
    """

    answer: Message
    words: tuple[str, ...]
    new: tuple[Message, ...]
    ending: int | None


@dataclass(frozen=True)
class Conversation:
    start: tuple[Message, ...]
    turns: tuple[Turn, ...]


class Words:
    """Counts words, so that none is given twice."""

    def __init__(self) -> None:
        self._count = 0

    def next(self, text: str) -> str:
        """Return `text` between two new words that are alike."""
        self._count += 1
        return f"[w{self._count}]{text}[w{self._count}]"


@st.composite
def conversations(
    draw: st.DrawFn,
    *,
    calls: bool = True,
    call_rounds: int = 9,
    reasoning: bool = True,
    system: bool = True,
    max_turns: int = 5,
) -> Conversation:
    """Draw a conversation.

    calls         whether answers may call tools
    call_rounds   how many answers may
    reasoning     whether answers may have reasoning
    system        whether a system message may begin it
    """
    words = Words()
    start: list[Message] = [{"role": "user", "content": words.next(draw(FREE_TEXT))}]
    if system and draw(st.booleans()):
        start.insert(0, {"role": "system", "content": words.next(draw(FREE_TEXT))})
    turns = []
    for number in range(draw(st.integers(1, max_turns))):
        num_calls = draw(st.integers(0, 3)) if calls and call_rounds > 0 else 0
        call_rounds -= num_calls > 0
        turns.append(_turn(draw, words, number, num_calls, reasoning and draw(st.booleans())))
    return Conversation(tuple(start), tuple(turns))


def _turn(draw: st.DrawFn, words: Words, number: int, num_calls: int, reasoning: bool) -> Turn:
    told: list[str] = []

    def part() -> str:
        told.append(words.next(draw(FREE_TEXT)))
        return told[-1]

    answer: dict[str, Any] = {"role": "assistant", "content": ""}
    if reasoning:
        answer["reasoning_content"] = part()
    if not num_calls or draw(st.booleans()):
        answer["content"] = part()
    new: list[Message] = []
    if num_calls:
        answer["tool_calls"] = []
    for i in range(num_calls):
        call_id = f"call{number:03}{i:02}"
        function = {"name": "look", "arguments": json.dumps({"x": part()})}
        answer["tool_calls"].append({"id": call_id, "type": "function", "function": function})
        content = words.next(draw(FREE_TEXT))
        new.append({"role": "tool", "tool_call_id": call_id, "content": content})
    if not num_calls or draw(st.integers(0, 3)) == 0:
        new.append({"role": "user", "content": words.next(draw(FREE_TEXT))})
    marks = tuple(text[: text.index("]") + 1] for text in told)
    return Turn(answer, marks, tuple(new), draw(st.none() | st.integers(0, 9)))
