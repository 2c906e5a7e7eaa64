"""Items of OpenAI's Responses API -> the messages of an episode."""

import base64
import binascii
from dataclasses import dataclass, field
from typing import Any

from mcore_rl.agents.gateway.api import Memory
from mcore_rl.agents.gateway.errors import BadRequest, unsupported
from mcore_rl.agents.gateway.fields import Body, joined_text, objects, optional, required
from mcore_rl.agents.gateway.normal import (
    assistant_message,
    function_tool,
    read_arguments,
    tool_call,
    tool_message,
)
from mcore_rl.agents.messages import Message, Tool

_TEXT = frozenset({"input_text", "output_text", "text"})
_REASONING = frozenset({"reasoning_text", "summary_text", "text"})
_SEALED = "mcore_rl."
"""Begins the field encrypted_content of our reasoning items, which hides nothing."""


def sealed(reasoning: str) -> str:
    """Return reasoning as encrypted_content, for clients that send back nothing else of it."""
    return _SEALED + base64.b64encode(reasoning.encode()).decode()


def read_tools(tools: list[Any] | None) -> tuple[Tool, ...]:
    found = []
    for place, tool in objects(tools, "tools"):
        if tool.get("type") != "function":
            raise unsupported(
                f"{place}.type={str(tool.get('type'))[:64]}",
                "switch the tool off in the agent, or give it as a function tool",
            )
        found.append(
            function_tool(
                required(tool, "name", str, f"{place}."),
                optional(tool, "description", str, f"{place}."),
                optional(tool, "parameters", dict, f"{place}."),
            )
        )
    return tuple(found)


def read_input(body: Body, memory: Memory) -> tuple[Message, ...]:
    """Return the messages of a request, those of the response before it included.

    Instructions come first, as a message of the system; they are not carried over to a request
    that names this one's response as its previous one.
    """
    before: tuple[Message, ...] = ()
    previous = optional(body, "previous_response_id", str)
    if previous is not None:
        if previous not in memory.responses:
            raise BadRequest(
                "previous_response_id",
                f"this session has stored no response {previous[:64]!r}; send the whole input",
                "previous_response_not_found",
            )
        before = memory.responses[previous]
    instructions = optional(body, "instructions", str)
    system = ({"role": "system", "content": instructions},) if instructions else ()
    return (*system, *before, *_read_items(body.get("input"), memory))


def _read_items(given: Any, memory: Memory) -> tuple[Message, ...]:
    if isinstance(given, str):
        return ({"role": "user", "content": given},)
    if not isinstance(given, list) or not given:
        raise BadRequest("input", "must be a text or a list of items that is not empty")
    joiner = _Joiner(memory)
    for place, item in objects(given, "input"):
        joiner.add(item, place)
    return joiner.finish()


@dataclass
class _Turn:
    """A message of the assistant, whose items follow one another: reasoning, text, calls."""

    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)


class _Joiner:
    """Joins the items that one response consists of into one message."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._messages: list[Message] = []
        self._turn: _Turn | None = None

    def add(self, item: Body, place: str) -> None:
        kind = optional(item, "type", str, f"{place}.") or "message"
        if kind == "message":
            self._add_message(item, place)
        elif kind == "reasoning":
            turn = self._turn
            is_next = turn is not None and bool(turn.texts or turn.calls)
            self._open(is_next).reasoning.append(_reasoning(item, place))
        elif kind == "function_call":
            self._open(False).calls.append(self._call(item, f"{place}."))
        elif kind == "function_call_output":
            self._end_turn()
            call_id = required(item, "call_id", str, f"{place}.")
            output = joined_text(item.get("output"), f"{place}.output", _TEXT)
            self._messages.append(tool_message(call_id, output))
        else:
            raise unsupported(
                f"{place}.type={kind[:64]}",
                "send messages, reasoning, function_call and function_call_output",
            )

    def finish(self) -> tuple[Message, ...]:
        self._end_turn()
        return tuple(self._messages)

    def _add_message(self, item: Body, place: str) -> None:
        role = required(item, "role", str, f"{place}.")
        text = joined_text(item.get("content"), f"{place}.content", _TEXT)
        if role == "assistant":
            turn = self._turn
            self._open(turn is not None and bool(turn.texts or turn.calls)).texts.append(text)
        elif role in ("system", "developer", "user"):
            self._end_turn()
            role = "user" if role == "user" else "system"
            self._messages.append({"role": role, "content": text})
        else:
            raise unsupported(f"{place}.role={role[:64]}", "use system, user or assistant")

    def _call(self, item: Body, place: str) -> dict[str, Any]:
        call_id = required(item, "call_id", str, place)
        known = self._memory.arguments
        arguments = read_arguments(f"{place}arguments", call_id, item.get("arguments"), known)
        return tool_call(call_id, required(item, "name", str, place), arguments)

    def _open(self, is_next: bool) -> _Turn:
        if is_next:
            self._end_turn()
        if self._turn is None:
            self._turn = _Turn()
        return self._turn

    def _end_turn(self) -> None:
        if self._turn is not None:
            texts = "".join(self._turn.texts)
            reasoning = "".join(self._turn.reasoning)
            self._messages.append(assistant_message(texts, reasoning, self._turn.calls))
            self._turn = None


def _reasoning(item: Body, place: str) -> str:
    """Return the text of a reasoning item: its content, else what we sealed, else its summary."""
    text = joined_text(item.get("content"), f"{place}.content", _REASONING)
    if text:
        return text
    hidden = optional(item, "encrypted_content", str, f"{place}.") or ""
    if hidden.startswith(_SEALED):
        try:
            return base64.b64decode(hidden.removeprefix(_SEALED), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise BadRequest(f"{place}.encrypted_content", "is not what we gave") from None
    return joined_text(item.get("summary"), f"{place}.summary", _REASONING)
