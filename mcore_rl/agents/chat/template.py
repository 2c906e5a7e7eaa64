"""Renders conversations with a tokenizer's chat template, in the form that this template reads.

Templates differ in how they want the arguments of tool calls (object or text), under which key
they read an answer's reasoning, and in whether a message may hold several calls. A few renderings
at the start find this out, and also when the template lets the row of an episode go on.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from mcore_rl.agents.messages import ConversationError, Message, Tool
from mcore_rl.process.errors import describe_error

MARK = "q7Zk3Wv9"
"""Text of the trial messages that no template contains."""
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
TEMPLATE_ERRORS = (
    *(TemplateError, TypeError, ValueError, LookupError, AttributeError),
    RecursionError,
)
"""Templates raise these for conversations that they were not written for."""


TRIAL_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks something up.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}


class RenderError(ConversationError):
    """The chat template refuses a conversation."""


class ChatTemplate:
    """The chat template of a tokenizer with fixed options."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> None:
        """`options`: variables of the template, such as enable_thinking.

        Raises ValueError if the tokenizer has no chat template.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path or type(tokenizer).__name__} has no chat"
                " template; episodes need one: save it as chat_template.jinja beside tokenizer.json"
            )
        self._tokenizer = tokenizer
        self._options = dict(options)
        self.source: Any = tokenizer.chat_template
        """Text of the template, or texts by name."""
        self.shows_calls = False
        """Whether the template shows tool calls."""
        self.shows_tools = False
        """Whether the template tells the model which tools there are."""
        self._as_text = False
        self._reasoning_key = REASONING_KEYS[0]
        self._one_call = False
        self.text_is_reasoning = False
        """Whether text beside a call is read as reasoning, as gpt-oss has it."""
        self._learn()

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool], generation_prompt: bool
    ) -> str:
        """Return the text of the conversation, special tokens included.

        Raises RenderError, with the template's own words, if the template refuses it.
        """
        prepared: list[dict[str, Any]] = []
        for message in messages:
            prepared += self._prepare(message)
        template: Any = self._tokenizer.apply_chat_template
        try:
            return template(
                prepared,
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self._options,
            )
        except TEMPLATE_ERRORS as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise RenderError(
                f"the chat template cannot render a conversation of {len(messages)} messages"
                f" ({roles}): {describe_error(error)}; change the messages that the"
                " environment gives, or the tokenizer's chat template"
            ) from error

    def _prepare(self, message: Message) -> list[dict[str, Any]]:
        """Return the message as this template reads it: one message, or one for each call."""
        prepared = dict(message)
        if prepared.get("role") != "assistant":
            return [prepared]
        calls = [self._prepare_call(call) for call in prepared.pop("tool_calls", None) or ()]
        content = prepared.get("content") or ""
        prepared["content"] = content
        reasoning = prepared.pop("reasoning_content", None)
        if reasoning and not (calls and content and self.text_is_reasoning):
            prepared[self._reasoning_key] = reasoning
        if not calls:
            return [prepared]
        if not self._one_call:
            return [{**prepared, "tool_calls": calls}]
        others = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls[1:]]
        return [{**prepared, "tool_calls": calls[:1]}, *others]

    def _prepare_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        arguments = function.get("arguments")
        if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
            arguments = function["arguments"] = "{}"
        if self._as_text and not isinstance(arguments, str):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        elif not self._as_text and isinstance(arguments, str):
            function["arguments"] = _decode_arguments(arguments)
        return {**call, "type": call.get("type", "function"), "function": function}

    def _learn(self) -> None:
        """Find the forms in which the template shows calls and reasoning."""
        if not self._shows("call", _trial(calls=1)):
            self._as_text = True
            self._as_text = self._shows("call", _trial(calls=1))
        self.shows_calls = self._shows("call", _trial(calls=1))
        self.shows_tools = self._shows_trial_tool()
        two = self._shows("call", _trial(calls=2)) and self._shows("other", _trial(calls=2))
        self._one_call = self.shows_calls and not two
        for key in REASONING_KEYS:
            self._reasoning_key = key
            if any(self._shows("why", _trial(calls, reasoning=True)) for calls in (0, 1)):
                break
        else:
            self._reasoning_key = REASONING_KEYS[0]
        self.text_is_reasoning = self._shows(
            "why", _trial(calls=1, reasoning=True)
        ) and not self._shows("call", _trial(calls=1, reasoning=True, content="text"))

    def _shows_trial_tool(self) -> bool:
        hello = [{"role": "user", "content": "hello"}]
        try:
            text = self.render(hello, [TRIAL_TOOL], generation_prompt=True)
        except RenderError:
            return False
        return TRIAL_TOOL["function"]["description"] in text

    def _shows(self, part: str, messages: Sequence[Message]) -> bool:
        try:
            return MARK + part in self.render(messages, [TRIAL_TOOL], generation_prompt=False)
        except RenderError:
            return False


def make_trial_call(call_id: str, value: str) -> dict[str, Any]:
    """Return a call of TRIAL_TOOL whose argument is `value`."""
    function = {"name": "look", "arguments": json.dumps({"x": value})}
    return {"id": call_id, "type": "function", "function": function}


def _trial(calls: int, reasoning: bool = False, content: str = "") -> list[Message]:
    """Return a conversation that ends with an answer of the assistant."""
    answer: dict[str, Any] = {"role": "assistant", "content": content}
    if not calls:
        answer["content"] = "text"
    else:
        values = [MARK + "call", MARK + "other"][:calls]
        answer["tool_calls"] = [
            make_trial_call(f"call0000{i}", value) for i, value in enumerate(values)
        ]
    if reasoning:
        answer["reasoning_content"] = MARK + "why"
    return [{"role": "user", "content": "text"}, answer]


def _decode_arguments(arguments: str) -> Any:
    """Return the JSON object of a call's arguments; other text is returned as it is."""
    try:
        value = json.loads(arguments)
    except ValueError:  # from a program that keeps its own history
        return arguments
    return value if isinstance(value, dict) else arguments


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

    def render_whole(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[int, ...]: ...

    def render_appended(
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
        chat_format.render_whole([*history, *new], [TRIAL_TOOL])
    except ValueError:
        return RowOutcome.REFUSED
    ids = chat_format.render_appended(history, (), new, [TRIAL_TOOL])
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
        answer["tool_calls"] = [make_trial_call(f"call0000{i}", f"value {i}") for i in numbers]
    return answer


def _results(number: int, first: int = 0) -> list[Message]:
    return [
        {"role": "tool", "tool_call_id": f"call0000{i}", "content": f"result {i}"}
        for i in range(first, first + number)
    ]
