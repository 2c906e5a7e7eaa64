"""Anthropic's messages <-> the messages of an episode.

A stream carries each content block in one delta after the answer is complete.
"""

from collections.abc import Iterator
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
    make_anthropic_error,
    read_max_tokens,
    read_objects,
    read_optional,
    read_part_text,
    read_required,
    refuse,
    refuse_unsupported,
    remember_arguments,
    stop_texts,
)
from mcore_rl.agents.gateway.normal import (
    UNREADABLE,
    keep_exact_arguments,
    make_assistant_message,
    make_function_tool,
    make_tool_call,
    make_tool_message,
    normalize_message,
    parse_arguments,
)
from mcore_rl.agents.messages import ChatRequest, Completion, Message, Tool

_REFUSED = {
    "mcp_servers": "run the servers in the agent, and give their tools as function tools",
    "container": "run code in the agent",
    "output_format": "ask for the format in the prompt, and check it in the reward",
}
_KNOWN = frozenset(
    {
        *_REFUSED,
        "messages",
        "model",
        "system",
        "tools",
        "tool_choice",
        "max_tokens",
        "stop_sequences",
        "stream",
        "metadata",
        "service_tier",
        "inference_geo",
    }
)
_TEXT = frozenset({"text"})
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_SIGNATURE = "mcore_rl"
"""Thinking blocks carry a signature, which clients send back; nobody checks it here."""


class AnthropicMessages:
    """POST /v1/messages."""

    keep_alive = api.make_event({"type": "ping"}, "ping")

    def read(self, body: Body, memory: Memory) -> Call:
        refuse(body, _REFUSED)
        tools = read_tools(read_optional(body, "tools", list))
        request = ChatRequest(
            messages=read_messages(body, memory),
            tools=tools if _uses_tools(read_optional(body, "tool_choice", dict)) else (),
            max_tokens=read_max_tokens(body, "max_tokens"),
            stop=stop_texts(body, "stop_sequences"),
        )
        return Call(
            request=request,
            model=read_optional(body, "model", str) or "",
            is_streamed=bool(read_optional(body, "stream", bool)),
            ignored=list_ignored_names(body, _KNOWN),
        )

    def answer(self, call: Call, answered: Answered) -> dict[str, Any]:
        completion = answered.completion
        return {
            **_head(call, answered),
            "content": make_content_blocks(completion.answer.message),
            **_explain_ending(completion),
            "usage": _usage(answered, len(completion.token_ids)),
        }

    def events(self, call: Call, answered: Answered) -> Iterator[bytes]:
        message = {**_head(call, answered), "usage": _usage(answered, 0)}
        yield _event("message_start", message=message)
        finished = self.answer(call, answered)
        for index, block in enumerate(finished["content"]):
            empty, deltas = _deltas(block, answered)
            yield _event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        ending = {name: finished[name] for name in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", delta=ending, usage=finished["usage"])
        yield _event("message_stop")

    def error(self, error: ApiError) -> dict[str, Any]:
        return make_anthropic_error(error)

    def error_event(self, error: ApiError) -> bytes:
        return api.make_event(make_anthropic_error(error), "error")

    def remember(self, call: Call, answered: Answered, memory: Memory) -> None:
        remember_arguments(answered, memory)


def _head(call: Call, answered: Answered) -> dict[str, Any]:
    return {
        "id": f"msg_{answered.id}",
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _explain_ending(completion: Completion) -> dict[str, str | None]:
    """Return why the answer ends, and the text of the client that ended it."""
    if completion.finish_reason == "stop" and completion.answer.stop_text:
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.answer.stop_text}
    reason = _STOP_REASONS.get(completion.finish_reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(answered: Answered, num_sampled: int) -> dict[str, int]:
    return {
        "input_tokens": len(answered.completion.prompt_ids),
        "output_tokens": num_sampled,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return api.make_event({"type": kind, **fields}, kind)


def make_content_blocks(message: Message) -> list[dict[str, Any]]:
    """Return the blocks of an answer: thinking, text, and a tool_use for each call."""
    message = normalize_message(message)
    blocks: list[dict[str, Any]] = []
    if "reasoning_content" in message:
        thinking = message["reasoning_content"]
        blocks.append({"type": "thinking", "thinking": thinking, "signature": _SIGNATURE})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"], "citations": None})
    for call in message.get("tool_calls", ()):
        given = parse_arguments(call["function"]["arguments"])
        name = call["function"]["name"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": given})
    return blocks


def _deltas(block: Body, answered: Answered) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a block without what the deltas fill in, and those deltas."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        return {**block, "thinking": "", "signature": ""}, [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
    partial = _arguments_text(block, answered)
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": partial}]


def _arguments_text(block: Body, answered: Answered) -> str:
    """Return the arguments as the policy wrote them, or as an object if they are none."""
    calls = answered.completion.answer.message["tool_calls"]
    known = {call["id"]: call["function"]["arguments"] for call in calls}
    if UNREADABLE in block["input"] or not block["input"]:
        known = {}
    return keep_exact_arguments(block["id"], block["input"], known)


def _uses_tools(choice: Body | None) -> bool:
    kind = "auto" if choice is None else read_required(choice, "type", str, "tool_choice.")
    if kind not in ("auto", "none"):
        raise refuse_unsupported(
            "tool_choice", "use auto or none; the policy itself decides to call a tool"
        )
    return kind == "auto"


def read_tools(tools: list[Any] | None) -> tuple[Tool, ...]:
    found = []
    for place, tool in read_objects(tools, "tools"):
        kind = read_optional(tool, "type", str, f"{place}.")
        if kind not in (None, "custom"):
            raise refuse_unsupported(
                f"{place}.type={kind[:64]}", "give it as a tool with input_schema"
            )
        found.append(
            make_function_tool(
                read_required(tool, "name", str, f"{place}."),
                read_optional(tool, "description", str, f"{place}."),
                read_optional(tool, "input_schema", dict, f"{place}."),
            )
        )
    return tuple(found)


def read_messages(body: Body, memory: Memory) -> tuple[Message, ...]:
    messages: list[Message] = []
    system = join_text(body.get("system"), "system", _TEXT)
    if system:
        messages.append({"role": "system", "content": system})
    given = read_required(body, "messages", list)
    if not given:
        raise BadRequestError("messages", "must not be empty")
    for place, message in read_objects(given, "messages"):
        role = read_required(message, "role", str, f"{place}.")
        content = message.get("content")
        if role == "assistant":
            messages.append(_read_assistant(content, f"{place}.content", memory))
        elif role == "user":
            messages += _read_user(content, f"{place}.content")
        elif role == "system":
            text = join_text(content, f"{place}.content", _TEXT)
            messages.append({"role": "system", "content": text})
        else:
            raise refuse_unsupported(f"{place}.role={role[:64]}", "use user or assistant")
    return tuple(messages)


def _read_assistant(content: Any, where: str, memory: Memory) -> Message:
    if not isinstance(content, list):
        return make_assistant_message(join_text(content, where, _TEXT))
    texts: list[str] = []
    thoughts: list[str] = []
    calls = []
    for place, block in read_objects(content, where):
        kind = read_required(block, "type", str, f"{place}.")
        if kind == "text":
            texts.append(read_required(block, "text", str, f"{place}."))
        elif kind == "thinking":
            thoughts.append(read_required(block, "thinking", str, f"{place}."))
        elif kind == "tool_use":
            call_id = read_required(block, "id", str, f"{place}.")
            given = read_optional(block, "input", dict, f"{place}.") or {}
            arguments = keep_exact_arguments(call_id, given, memory.arguments)
            calls.append(
                make_tool_call(call_id, read_required(block, "name", str, f"{place}."), arguments)
            )
        else:
            raise refuse_unsupported(
                f"{place}.type={kind[:64]}", "send text, thinking and tool_use"
            )
    return make_assistant_message("".join(texts), "".join(thoughts), calls)


def _read_user(content: Any, where: str) -> Iterator[Message]:
    """Yield a message of a tool for each result, and one of the user for the texts between."""
    if not isinstance(content, list):
        yield {"role": "user", "content": join_text(content, where, _TEXT)}
        return
    texts: list[str] = []
    for place, block in read_objects(content, where):
        if block.get("type") != "tool_result":
            texts.append(read_part_text(block, place, _TEXT))
            continue
        if texts:
            yield {"role": "user", "content": "".join(texts)}
            texts = []
        call_id = read_required(block, "tool_use_id", str, f"{place}.")
        yield make_tool_message(call_id, join_text(block.get("content"), f"{place}.content", _TEXT))
    if texts or not content:
        yield {"role": "user", "content": "".join(texts)}
