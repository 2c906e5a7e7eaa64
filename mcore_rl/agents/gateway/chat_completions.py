"""OpenAI's chat completions <-> the messages of an episode.

A stream carries the whole answer in one delta after it is complete.
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
    DecodeToken,
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
from mcore_rl.agents.gateway.normal import (
    make_assistant_message,
    make_function_tool,
    make_tool_call,
    make_tool_message,
    normalize_message,
    read_arguments,
)
from mcore_rl.agents.messages import ChatRequest, Message, Tool

_REFUSED = {
    "logit_bias": "log-probs must be those of the policy that trains",
    "top_logprobs": "only the log-probs of sampled tokens are kept",
    "functions": "use tools",
    "function_call": "use tools and tool_choice",
    "audio": "the policy writes text only",
    "prediction": "leave it out",
    "web_search_options": "give the policy a function tool that searches",
}
_KNOWN = frozenset(
    {
        *_REFUSED,
        "messages",
        "model",
        "tools",
        "tool_choice",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "stream",
        "stream_options",
        "n",
        "logprobs",
        "return_token_ids",
        "response_format",
        "modalities",
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
    }
)
_TEXT = frozenset({"text"})


class ChatCompletions:
    """POST /v1/chat/completions."""

    keep_alive = api.COMMENT

    def __init__(self, decode_token: DecodeToken) -> None:
        self._decode_token = decode_token

    def read(self, body: Body, memory: Memory) -> Call:
        refuse(body, _REFUSED)
        if read_optional(body, "n", int) not in (None, 1):
            raise refuse_unsupported("n", "send one request for each sample")
        refuse_format(body.get("response_format"), "response_format")
        messages = read_messages(read_required(body, "messages", list), memory)
        tools = read_tools(read_optional(body, "tools", list))
        stream_options = read_optional(body, "stream_options", dict) or {}
        return Call(
            request=ChatRequest(
                messages=messages,
                tools=tools if uses_tools(body.get("tool_choice")) else (),
                max_tokens=read_max_tokens(body, "max_completion_tokens", "max_tokens"),
                stop=stop_texts(body, "stop"),
            ),
            model=read_optional(body, "model", str) or "",
            is_streamed=bool(read_optional(body, "stream", bool)),
            ignored=list_ignored_names(body, _KNOWN),
            options={
                "logprobs": bool(read_optional(body, "logprobs", bool)),
                "token_ids": bool(read_optional(body, "return_token_ids", bool)),
                "usage": bool(stream_options.get("include_usage")),
            },
        )

    def answer(self, call: Call, answered: Answered) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": answer_message(answered),
            **self._make_ending(call, answered),
        }
        body = {**_head(call, answered, "chat.completion"), "choices": [choice]}
        if call.options.get("token_ids"):
            body["prompt_token_ids"] = answered.completion.prompt_ids
        return {**body, "usage": usage(answered)}

    def events(self, call: Call, answered: Answered) -> Iterator[bytes]:
        head = _head(call, answered, "chat.completion.chunk")
        delta = answer_message(answered)
        for number, tool in enumerate(delta.get("tool_calls") or ()):
            tool["index"] = number
        chunk = {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        if call.options.get("token_ids"):
            chunk["prompt_token_ids"] = answered.completion.prompt_ids
        yield api.make_event(chunk)
        ending = {"index": 0, "delta": {}, **self._make_ending(call, answered)}
        yield api.make_event({**head, "choices": [ending]})
        if call.options.get("usage"):
            yield api.make_event({**head, "choices": [], "usage": usage(answered)})
        yield api.DONE

    def error(self, error: ApiError) -> dict[str, Any]:
        return make_openai_error(error)

    def error_event(self, error: ApiError) -> bytes:
        return api.make_event(make_openai_error(error))

    def remember(self, call: Call, answered: Answered, memory: Memory) -> None:
        remember_arguments(answered, memory)

    def _make_ending(self, call: Call, answered: Answered) -> dict[str, Any]:
        completion = answered.completion
        ending: dict[str, Any] = {"finish_reason": completion.finish_reason, "logprobs": None}
        if call.options.get("logprobs"):
            pairs = zip(completion.token_ids, completion.logprobs, strict=True)
            ending["logprobs"] = {
                "content": [self._token(token, logprob) for token, logprob in pairs],
                "refusal": None,
            }
        if call.options.get("token_ids"):
            ending["token_ids"] = completion.token_ids
        return ending

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._decode_token(token)
        utf8 = list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": utf8, "top_logprobs": []}


def _head(call: Call, answered: Answered, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answered.id}",
        "object": kind,
        "created": answered.created_s,
        "model": call.model,
    }


def answer_message(answered: Answered) -> dict[str, Any]:
    """Return the answer as OpenAI has it: without text beside calls, its content is null."""
    message = normalize_message(answered.completion.answer.message)
    if "tool_calls" in message:
        message["content"] = message["content"] or None
    return {**message, "refusal": None}


def usage(answered: Answered) -> dict[str, int]:
    num_prompt = len(answered.completion.prompt_ids)
    num_sampled = len(answered.completion.token_ids)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }


def refuse_format(value: Any, where: str) -> None:
    """Refuse JSON schemas: a constrained sample has other log-probs than the policy."""
    if value is None or (isinstance(value, dict) and value.get("type") in (None, "text")):
        return
    raise refuse_unsupported(where, "ask for the format in the prompt, and check it in the reward")


def uses_tools(choice: Any) -> bool:
    """Return whether the policy sees the tools: not with "none"; a forced call is refused."""
    if choice is None or choice == "auto":
        return True
    if choice == "none":
        return False
    raise refuse_unsupported(
        "tool_choice", "use auto or none; the policy itself decides to call a tool"
    )


def read_tools(tools: list[Any] | None) -> tuple[Tool, ...]:
    found = []
    for place, tool in read_objects(tools, "tools"):
        if tool.get("type") != "function":
            raise refuse_unsupported(
                f"{place}.type={str(tool.get('type'))[:64]}", "use function tools"
            )
        function = read_required(tool, "function", dict, f"{place}.")
        place = f"{place}.function."
        found.append(
            make_function_tool(
                read_required(function, "name", str, place),
                read_optional(function, "description", str, place),
                read_optional(function, "parameters", dict, place),
            )
        )
    return tuple(found)


def read_messages(messages: list[Any], memory: Memory) -> tuple[Message, ...]:
    if not messages:
        raise BadRequestError("messages", "must not be empty")
    return tuple(
        _read_message(message, place, memory)
        for place, message in read_objects(messages, "messages")
    )


def _read_message(message: Body, place: str, memory: Memory) -> Message:
    role = read_required(message, "role", str, f"{place}.")
    content = join_text(message.get("content"), f"{place}.content", _TEXT)
    if role == "assistant":
        reasoning = read_optional(message, "reasoning_content", str, f"{place}.")
        reasoning = reasoning or read_optional(message, "reasoning", str, f"{place}.")
        calls = read_optional(message, "tool_calls", list, f"{place}.")
        return make_assistant_message(
            content, reasoning or "", _read_calls(calls, f"{place}.tool_calls", memory)
        )
    if role == "tool":
        return make_tool_message(read_required(message, "tool_call_id", str, f"{place}."), content)
    if role in ("system", "developer", "user"):
        return {"role": "user" if role == "user" else "system", "content": content}
    raise refuse_unsupported(f"{place}.role={role[:64]}", "use system, user, assistant or tool")


def _read_calls(calls: list[Any] | None, where: str, memory: Memory) -> list[dict[str, Any]]:
    found = []
    for place, call in read_objects(calls, where):
        call_id = read_required(call, "id", str, f"{place}.")
        function = read_required(call, "function", dict, f"{place}.")
        name = read_required(function, "name", str, f"{place}.function.")
        where = f"{place}.function.arguments"
        given = function.get("arguments")
        arguments = read_arguments(where, call_id, given, memory.arguments)
        found.append(make_tool_call(call_id, name, arguments))
    return found
