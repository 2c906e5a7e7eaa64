"""Tries before the first episode when a chat template lets the row of an episode go on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from mcore_rl.agents.chat.template import TRIAL_TOOL, trial_call
from mcore_rl.agents.messages import Message, Tool


class RowOutcome(StrEnum):
    """The fate of a row when messages follow an answer.

    APPENDS   the row goes on
    FORKS     another row begins, because the template changes what came before
    REFUSED   the template renders no such conversation: an episode that comes there fails
    """

    APPENDS = "appends"
    FORKS = "forks"
    REFUSED = "refused"


class Case(StrEnum):
    """A situation in an episode, in the words of the log."""

    USER = "user messages after an answer"
    USER_AFTER_REASONING = "user messages after reasoning"
    TOOL = "tool messages after a call"
    TOOL_AFTER_REASONING = "tool messages after reasoning and a call"
    TOOL_AFTER_TEXT = "tool messages after text and a call"
    TOOL_AFTER_BOTH = "tool messages after reasoning, text and a call"
    SEVERAL_CALLS = "tool messages after several calls at once"
    MORE_CALLS = "tool messages after a second round of calls"
    USER_AFTER_CALLS = "user messages after calls with reasoning"


@dataclass(frozen=True)
class TemplateBehavior:
    """The outcome of each situation, and lines for the log about those that do not append."""

    outcomes: Mapping[Case, RowOutcome]
    lines: tuple[str, ...]


class Format(Protocol):
    """The part of a ChatFormat that is tried."""

    def whole(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[int, ...]: ...

    def appended(
        self,
        history: Sequence[Message],
        answer_ids: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[Tool],
    ) -> tuple[int, ...] | None: ...


def probe_format(chat_format: Format, kept: Format, shows_calls: bool) -> TemplateBehavior:
    """Return what `chat_format` does in each Case.

    kept          the same format with reasoning=keep, for advice
    shows_calls   whether the template shows tool calls at all
    """
    outcomes = {case: _outcome(chat_format, case) for case in Case}
    lines = [_line(case, outcome, kept) for case, outcome in outcomes.items()]
    if not shows_calls:
        lines.append("the chat template shows no tool calls; set one that does to train with tools")
    return TemplateBehavior(outcomes, tuple(line for line in lines if line))


def _outcome(chat_format: Format, case: Case) -> RowOutcome:
    history, new = _conversation(case)
    try:
        chat_format.whole([*history, *new], [TRIAL_TOOL])
    except ValueError:
        return RowOutcome.REFUSED
    ids = chat_format.appended(history, (), new, [TRIAL_TOOL])
    return RowOutcome.FORKS if ids is None else RowOutcome.APPENDS


def _line(case: Case, outcome: RowOutcome, kept: Format) -> str:
    if outcome is RowOutcome.APPENDS:
        return ""
    if outcome is RowOutcome.REFUSED:
        return f"{case}: the chat template refuses such a conversation"
    line = f"{case} start a new row"
    if _outcome(kept, case) is RowOutcome.APPENDS:
        line += ": agents.reasoning=keep renders one row"
    return line


def _conversation(case: Case) -> tuple[list[Message], list[Message]]:
    """Return a history that ends with an answer, and the messages that follow it."""
    question: Message = {"role": "user", "content": "Where is it?"}
    told: Message = {"role": "user", "content": "And then?"}
    call, result = _answer(1), _results(1)
    match case:
        case Case.USER:
            return [question, _answer(0, "Here.")], [told]
        case Case.USER_AFTER_REASONING:
            return [question, _answer(0, "Here.", "It was there.")], [told]
        case Case.TOOL:
            return [question, call], result
        case Case.TOOL_AFTER_REASONING:
            return [question, _answer(1, "", "I look.")], result
        case Case.TOOL_AFTER_TEXT:
            return [question, _answer(1, "I look.")], result
        case Case.TOOL_AFTER_BOTH:
            return [question, _answer(1, "I look.", "It is far.")], result
        case Case.SEVERAL_CALLS:
            return [question, _answer(2)], _results(2)
        case Case.MORE_CALLS:
            return [question, call, *result, _answer(1, first=1)], _results(1, first=1)
        case Case.USER_AFTER_CALLS:
            thoughtful = _answer(1, "", "I look.")
            return [question, thoughtful, *result, _answer(0, "Here.")], [told]


def _answer(num_calls: int, content: str = "", reasoning: str = "", first: int = 0) -> Message:
    answer: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        answer["reasoning_content"] = reasoning
    if num_calls:
        numbers = range(first, first + num_calls)
        answer["tool_calls"] = [trial_call(f"call0000{i}", f"value {i}") for i in numbers]
    return answer


def _results(number: int, first: int = 0) -> list[Message]:
    return [
        {"role": "tool", "tool_call_id": f"call0000{i}", "content": f"result {i}"}
        for i in range(first, first + number)
    ]
