"""OpenAI's Responses API <-> the messages of an episode.

items of the input --> messages --> the policy's message --> items of the output

A stream carries each item in one delta after the answer is complete.
"""

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from mcore_rl.agents.gateway import api
from mcore_rl.agents.gateway.api import (
    Answered,
    ApiError,
    BadRequestError,
    Body,
    Call,
    Memory,
    join_text,
    list_ignored_names,
    make_openai_error,
    read_max_tokens,
    read_objects,
    read_optional,
    read_required,
    refuse,
    refuse_unsupported,
    remember_arguments,
    stop_texts,
)
from mcore_rl.agents.gateway.chat_completions import refuse_format, uses_tools
from mcore_rl.agents.gateway.normal import (
    make_assistant_message,
    make_function_tool,
    make_tool_call,
    make_tool_message,
    normalize_message,
    read_arguments,
)
from mcore_rl.agents.messages import ChatRequest, Message, Tool

_TEXT = frozenset({"input_text", "output_text", "text"})
_REASONING = frozenset({"reasoning_text", "summary_text", "text"})
_SEAL = "mcore_rl."
"""Begins the field encrypted_content of our reasoning items, which hides nothing."""


_REFUSED = {
    "background": "wait for the answer, or stream it",
    "conversation": "send the whole input, or previous_response_id",
    "prompt": "send instructions and input",
    "top_logprobs": "only the log-probs of sampled tokens are kept",
}
_KNOWN = frozenset(
    {
        *_REFUSED,
        "model",
        "input",
        "instructions",
        "previous_response_id",
        "store",
        "include",
        "tools",
        "tool_choice",
        "max_output_tokens",
        "stop",
        "stream",
        "stream_options",
        "text",
        "user",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
    }
)
_ENCRYPTED = "reasoning.encrypted_content"


def seal(reasoning: str) -> str:
    """Return reasoning as encrypted_content, for clients that send back nothing else of it."""
    return _SEAL + base64.b64encode(reasoning.encode()).decode()


def read_tools(tools: list[Any] | None) -> tuple[Tool, ...]:
    found = []
    for place, tool in read_objects(tools, "tools"):
        if tool.get("type") != "function":
            raise refuse_unsupported(
                f"{place}.type={str(tool.get('type'))[:64]}",
                "switch the tool off in the agent, or give it as a function tool",
            )
        found.append(
            make_function_tool(
                read_required(tool, "name", str, f"{place}."),
                read_optional(tool, "description", str, f"{place}."),
                read_optional(tool, "parameters", dict, f"{place}."),
            )
        )
    return tuple(found)


def read_input(body: Body, memory: Memory) -> tuple[Message, ...]:
    """Return the messages of a request, those of the response before it included.

    Instructions come first, as a message of the system; they are not carried over to a request
    that names this one's response as its previous one.
    """
    before: tuple[Message, ...] = ()
    previous = read_optional(body, "previous_response_id", str)
    if previous is not None:
        if previous not in memory.responses:
            raise BadRequestError(
                "previous_response_id",
                f"this session has stored no response {previous[:64]!r}; send the whole input",
                "previous_response_not_found",
            )
        before = memory.responses[previous]
    instructions = read_optional(body, "instructions", str)
    system = ({"role": "system", "content": instructions},) if instructions else ()
    return (*system, *before, *_read_items(body.get("input"), memory))


def _read_items(given: Any, memory: Memory) -> tuple[Message, ...]:
    if isinstance(given, str):
        return ({"role": "user", "content": given},)
    if not isinstance(given, list) or not given:
        raise BadRequestError("input", "must be a text or a list of items that is not empty")
    joiner = _Joiner(memory)
    for place, item in read_objects(given, "input"):
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
        kind = read_optional(item, "type", str, f"{place}.") or "message"
        if kind == "message":
            self._add_message(item, place)
        elif kind == "reasoning":
            turn = self._turn
            is_next = turn is not None and bool(turn.texts or turn.calls)
            self._open(is_next).reasoning.append(_read_reasoning(item, place))
        elif kind == "function_call":
            self._open(False).calls.append(self._call(item, f"{place}."))
        elif kind == "function_call_output":
            self._end_turn()
            call_id = read_required(item, "call_id", str, f"{place}.")
            output = join_text(item.get("output"), f"{place}.output", _TEXT)
            self._messages.append(make_tool_message(call_id, output))
        else:
            raise refuse_unsupported(
                f"{place}.type={kind[:64]}",
                "send messages, reasoning, function_call and function_call_output",
            )

    def finish(self) -> tuple[Message, ...]:
        self._end_turn()
        return tuple(self._messages)

    def _add_message(self, item: Body, place: str) -> None:
        role = read_required(item, "role", str, f"{place}.")
        text = join_text(item.get("content"), f"{place}.content", _TEXT)
        if role == "assistant":
            turn = self._turn
            self._open(turn is not None and bool(turn.texts or turn.calls)).texts.append(text)
        elif role in ("system", "developer", "user"):
            self._end_turn()
            role = "user" if role == "user" else "system"
            self._messages.append({"role": role, "content": text})
        else:
            raise refuse_unsupported(f"{place}.role={role[:64]}", "use system, user or assistant")

    def _call(self, item: Body, place: str) -> dict[str, Any]:
        call_id = read_required(item, "call_id", str, place)
        known = self._memory.arguments
        arguments = read_arguments(f"{place}arguments", call_id, item.get("arguments"), known)
        return make_tool_call(call_id, read_required(item, "name", str, place), arguments)

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
            self._messages.append(make_assistant_message(texts, reasoning, self._turn.calls))
            self._turn = None


def _read_reasoning(item: Body, place: str) -> str:
    """Return the text of a reasoning item: its content, else what we sealed, else its summary."""
    text = join_text(item.get("content"), f"{place}.content", _REASONING)
    if text:
        return text
    hidden = read_optional(item, "encrypted_content", str, f"{place}.") or ""
    if hidden.startswith(_SEAL):
        try:
            return base64.b64decode(hidden.removeprefix(_SEAL), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise BadRequestError(f"{place}.encrypted_content", "is not what we gave") from None
    return join_text(item.get("summary"), f"{place}.summary", _REASONING)


class Responses:
    """POST /v1/responses."""

    keep_alive = api.COMMENT

    def read(self, body: Body, memory: Memory) -> Call:
        refuse(body, _REFUSED)
        text = read_optional(body, "text", dict) or {}
        refuse_format(text.get("format"), "text.format")
        tools = read_optional(body, "tools", list)
        include = read_optional(body, "include", list) or []
        store = read_optional(body, "store", bool)
        choice = body.get("tool_choice")
        found = read_tools(tools)
        return Call(
            request=ChatRequest(
                messages=read_input(body, memory),
                tools=found if uses_tools(choice) else (),
                max_tokens=read_max_tokens(body, "max_output_tokens"),
                stop=stop_texts(body, "stop"),
            ),
            model=read_optional(body, "model", str) or "",
            is_streamed=bool(read_optional(body, "stream", bool)),
            ignored=list_ignored_names(body, _KNOWN),
            options={
                "store": store is not False,
                "sealed": _ENCRYPTED in include,
                "instructions": body.get("instructions"),
                "previous": body.get("previous_response_id"),
                "tools": tools or [],
                "tool_choice": choice or "auto",
            },
        )

    def answer(self, call: Call, answered: Answered) -> dict[str, Any]:
        is_cut = answered.completion.finish_reason == "length"
        num_input = len(answered.completion.prompt_ids)
        num_output = len(answered.completion.token_ids)
        return {
            **_head(call, answered),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": make_output_items(call, answered),
            "usage": {
                "input_tokens": num_input,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": num_output,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": num_input + num_output,
            },
        }

    def events(self, call: Call, answered: Answered) -> Iterator[bytes]:
        numbers = count()

        def event(kind: str, **fields: Any) -> bytes:
            data = {"type": kind, "sequence_number": next(numbers), **fields}
            return api.make_event(data, kind)

        finished = self.answer(call, answered)
        begun = {**_head(call, answered), "status": "in_progress"}
        yield event("response.created", response=begun)
        yield event("response.in_progress", response=begun)
        for index, item in enumerate(finished["output"]):
            place = {"output_index": index, "item_id": item["id"]}
            started = {**item, "status": "in_progress", **_drop_content(item)}
            yield event("response.output_item.added", output_index=index, item=started)
            for kind, fields in _item_events(item):
                yield event(kind, **place, **fields)
            yield event("response.output_item.done", output_index=index, item=item)
        yield event(f"response.{finished['status']}", response=finished)

    def error(self, error: ApiError) -> dict[str, Any]:
        return make_openai_error(error)

    def error_event(self, error: ApiError) -> bytes:
        fields = {"code": error.code, "message": error.message, "param": error.param}
        return api.make_event({"type": "error", "sequence_number": 0, **fields}, "error")

    def remember(self, call: Call, answered: Answered, memory: Memory) -> None:
        remember_arguments(answered, memory)
        if call.options["store"]:
            messages = call.request.messages
            spoken = messages[1:] if call.options["instructions"] else messages
            answer = normalize_message(answered.completion.answer.message)
            memory.responses[_response_id(answered)] = (*spoken, answer)


def _response_id(answered: Answered) -> str:
    return f"resp_{answered.id}"


def _head(call: Call, answered: Answered) -> dict[str, Any]:
    return {
        "id": _response_id(answered),
        "object": "response",
        "created_at": answered.created_s,
        "model": call.model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": call.options["instructions"],
        "previous_response_id": call.options["previous"],
        "store": call.options["store"],
        "metadata": {},
        "parallel_tool_calls": True,
        "tools": call.options["tools"],
        "tool_choice": call.options["tool_choice"],
        "temperature": None,
        "top_p": None,
        "usage": None,
    }


def make_output_items(call: Call, answered: Answered) -> list[dict[str, Any]]:
    """Return the items of an answer: reasoning, a message, a function_call for each call.

    There is always a message or a call, so that an empty answer comes back, too.
    """
    message = normalize_message(answered.completion.answer.message)
    items: list[dict[str, Any]] = []
    if "reasoning_content" in message:
        text = message["reasoning_content"]
        item = {"id": f"rs_{answered.id}", "type": "reasoning", "summary": []}
        item["content"] = [{"type": "reasoning_text", "text": text}]
        item["encrypted_content"] = seal(text) if call.options["sealed"] else None
        items.append({**item, "status": "completed"})
    if message["content"] or "tool_calls" not in message:
        part = {"type": "output_text", "text": message["content"], "annotations": []}
        item = {"id": f"msg_{answered.id}", "type": "message", "role": "assistant"}
        items.append({**item, "content": [{**part, "logprobs": []}], "status": "completed"})
    for number, tool in enumerate(message.get("tool_calls", ())):
        item = {"id": f"fc_{answered.id}_{number}", "type": "function_call"}
        item |= {"call_id": tool["id"], **tool["function"], "status": "completed"}
        items.append(item)
    return items


def _drop_content(item: Body) -> dict[str, Any]:
    return {"arguments": ""} if item["type"] == "function_call" else {"content": []}


def _item_events(item: Body) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield kind and fields of the events between the beginning and the end of an item."""
    if item["type"] == "function_call":
        arguments = item["arguments"]
        yield "response.function_call_arguments.delta", {"delta": arguments}
        done = {"arguments": arguments, "name": item["name"]}
        yield "response.function_call_arguments.done", done
        return
    (part,) = item["content"]
    place = {"content_index": 0}
    is_text = item["type"] == "message"
    kind = "response.output_text" if is_text else "response.reasoning_text"
    logprobs = {"logprobs": []} if is_text else {}
    yield "response.content_part.added", {**place, "part": {**part, "text": ""}}
    yield f"{kind}.delta", {**place, "delta": part["text"], **logprobs}
    yield f"{kind}.done", {**place, "text": part["text"], **logprobs}
    yield "response.content_part.done", {**place, "part": part}
