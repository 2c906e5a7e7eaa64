"""OpenAI's Responses API <-> the messages of an episode.

A stream carries each item in one delta after the answer is complete.
"""

from collections.abc import Iterator
from itertools import count
from typing import Any

from mcore_rl.agents.gateway import sse
from mcore_rl.agents.gateway.api import Answered, Call, Memory, remember_arguments
from mcore_rl.agents.gateway.chat_completions import refuse_format, uses_tools
from mcore_rl.agents.gateway.errors import ApiError, openai_error
from mcore_rl.agents.gateway.fields import (
    Body,
    ignored_names,
    max_tokens,
    optional,
    refuse,
    stop_texts,
)
from mcore_rl.agents.gateway.normal import normal_message
from mcore_rl.agents.gateway.responses_input import read_input, read_tools, sealed
from mcore_rl.agents.messages import ChatRequest

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
_SEALED = "reasoning.encrypted_content"


class Responses:
    """POST /v1/responses."""

    keep_alive = sse.COMMENT

    def read(self, body: Body, memory: Memory) -> Call:
        refuse(body, _REFUSED)
        text = optional(body, "text", dict) or {}
        refuse_format(text.get("format"), "text.format")
        tools = optional(body, "tools", list)
        include = optional(body, "include", list) or []
        store = optional(body, "store", bool)
        choice = body.get("tool_choice")
        found = read_tools(tools)
        return Call(
            request=ChatRequest(
                messages=read_input(body, memory),
                tools=found if uses_tools(choice) else (),
                max_tokens=max_tokens(body, "max_output_tokens"),
                stop=stop_texts(body, "stop"),
            ),
            model=optional(body, "model", str) or "",
            is_streamed=bool(optional(body, "stream", bool)),
            ignored=ignored_names(body, _KNOWN),
            options={
                "store": store is not False,
                "sealed": _SEALED in include,
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
            "output": output_items(call, answered),
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
            return sse.event(data, kind)

        finished = self.answer(call, answered)
        begun = {**_head(call, answered), "status": "in_progress"}
        yield event("response.created", response=begun)
        yield event("response.in_progress", response=begun)
        for index, item in enumerate(finished["output"]):
            place = {"output_index": index, "item_id": item["id"]}
            started = {**item, "status": "in_progress", **_emptied(item)}
            yield event("response.output_item.added", output_index=index, item=started)
            for kind, fields in _item_events(item):
                yield event(kind, **place, **fields)
            yield event("response.output_item.done", output_index=index, item=item)
        yield event(f"response.{finished['status']}", response=finished)

    def error(self, error: ApiError) -> dict[str, Any]:
        return openai_error(error)

    def error_event(self, error: ApiError) -> bytes:
        fields = {"code": error.code, "message": error.message, "param": error.param}
        return sse.event({"type": "error", "sequence_number": 0, **fields}, "error")

    def remember(self, call: Call, answered: Answered, memory: Memory) -> None:
        remember_arguments(answered, memory)
        if call.options["store"]:
            messages = call.request.messages
            spoken = messages[1:] if call.options["instructions"] else messages
            answer = normal_message(answered.completion.answer.message)
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


def output_items(call: Call, answered: Answered) -> list[dict[str, Any]]:
    """Return the items of an answer: reasoning, a message, a function_call for each call.

    There is always a message or a call, so that an empty answer comes back, too.
    """
    message = normal_message(answered.completion.answer.message)
    items: list[dict[str, Any]] = []
    if "reasoning_content" in message:
        text = message["reasoning_content"]
        item = {"id": f"rs_{answered.id}", "type": "reasoning", "summary": []}
        item["content"] = [{"type": "reasoning_text", "text": text}]
        item["encrypted_content"] = sealed(text) if call.options["sealed"] else None
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


def _emptied(item: Body) -> dict[str, Any]:
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
