"""Answers requests whose fields are out of bounds with 400, before SGLang's application sees them.

body --> read whole --> parsed --> checked by request_fields --> handed on as it came, or 400
                               --> chat_history makes empty arguments of tool calls `{}`

Makes the histories that clients send such that every chat template can render them.

body of a chat --> empty arguments of calls are `{}` --> SGLang
               --> other arguments that are no object, or an end with the assistant: refused

SGLang answers empty arguments with 400, renders missing ones as null, and hands a last message of
the assistant to the model as one of the user.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import orjson

from mcore_rl.process.server_keys import read_call_arguments
from mcore_rl.rollout.key_gate import Application, Receive, Scope, Send
from mcore_rl.rollout.request_fields import FieldError, ModelBounds, check_request, refuse_grammars

_HISTORIES = {
    "/v1/chat/completions": "messages",
    "/v1/messages": "messages",
    "/v1/responses": "input",
}
"""Path -> the field with the conversation."""
_CONTINUES = ("continue_final_message", "add_generation_prompt")
"""Options of SGLang by which a client asks to go on with the assistant's message."""


def mend_history(path: str, body: dict[str, Any]) -> bool:
    """Make empty arguments of tool calls in `body` `{}`, and return whether there were any.

    Raises FieldError for other arguments that are no object, and if the assistant said the last.
    What is no conversation at all is left to SGLang.
    """
    name = _HISTORIES.get(path)
    history = body.get(name) if name else None
    if not isinstance(history, list) or not history:
        return False
    was_mended = False
    for place, holder in _calls(f"{name}", history):
        given = holder.get("arguments")
        if not isinstance(given, dict):
            holder["arguments"] = _read_chat_history(place, given)
            was_mended |= holder["arguments"] != given
    last = history[-1]
    is_answer = isinstance(last, dict) and last.get("role") == "assistant"
    if is_answer and not any(body.get(option) is not None for option in _CONTINUES):
        raise FieldError(
            f"{name}: the last message must not be the assistant's: nothing asks for more"
        )
    return was_mended


def _calls(name: str, history: list[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place of each call's arguments, and the object that holds them."""
    for number, item in enumerate(history):
        if not isinstance(item, dict):
            continue
        if item.get("type") == "function_call":
            yield f"{name}[{number}].arguments", item
        calls = item.get("tool_calls")
        for index, call in enumerate(calls if isinstance(calls, list) else ()):
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                yield f"{name}[{number}].tool_calls[{index}].function.arguments", function


def _read_chat_history(place: str, given: object) -> str:
    try:
        return read_call_arguments(given)
    except ValueError as error:
        raise FieldError(f"{place}: {error}") from None


CHECKED_PATHS = frozenset(
    {
        *("/generate", "/encode", "/classify", "/v1/completions", "/v1/chat/completions"),
        *("/v1/embeddings", "/v1/classify", "/v1/score", "/v1/responses", "/v1/messages"),
        *("/v1/messages/count_tokens", "/tokenize", "/v1/tokenize", "/detokenize"),
        *("/v1/detokenize", "/parse_function_call", "/separate_reasoning"),
    }
)
"""The paths of users that take JSON; /generate_images checks its own packed body."""
MOST_BODY_BYTES = 256 << 20


class FieldGate:
    """ASGI middleware that bounds the fields of every request on CHECKED_PATHS.

    bounds        returns what the model allows; asked at each request, as SGLang knows it late
    has_grammar   the server can constrain what the model writes; else such requests are refused
    """

    def __init__(
        self, app: Application, bounds: Callable[[], ModelBounds], has_grammar: bool
    ) -> None:
        self._app = app
        self._bounds = bounds
        self._has_grammar = has_grammar

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in CHECKED_PATHS:
            await self._app(scope, receive, send)
            return
        data = await _read(receive)
        if data is None:
            await _answer(send, 413, f"the body is larger than {MOST_BODY_BYTES >> 20} MiB")
            return
        try:
            admitted = self._admit(scope["path"], data)
        except FieldError as error:
            await _answer(send, 400, str(error))
            return
        await self._app(_with_length(scope, admitted), _replay(admitted, receive), send)

    def _admit(self, path: str, data: bytes) -> bytes:
        """Return the body for SGLang. Raises FieldError if it must not get there."""
        try:
            body = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise FieldError(f"the body is no JSON: {error}") from None
        check_request(path, body, self._bounds())
        if not self._has_grammar:
            refuse_grammars(body)
        return orjson.dumps(body) if mend_history(path, body) else data


async def _read(receive: Receive) -> bytes | None:
    """Return a request's body, or None if it is too large; what a client never ended is empty."""
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b""
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > MOST_BODY_BYTES:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


def _with_length(scope: Scope, data: bytes) -> Scope:
    """Return the scope with the length of a body that replaces the one that came."""
    others = [header for header in scope.get("headers", ()) if header[0] != b"content-length"]
    return {**scope, "headers": [*others, (b"content-length", str(len(data)).encode())]}


def _replay(data: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body that was read, and then what else comes."""
    is_given = False

    async def replayed() -> Any:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": data, "more_body": False}

    return replayed


async def _answer(send: Send, status: int, reason: str) -> None:
    """Send an error in OpenAI's form."""
    error = {"message": reason, "type": "invalid_request_error", "param": None, "code": status}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
