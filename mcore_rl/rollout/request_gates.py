"""Checks requests before SGLang's application sees them: their keys, then their fields.

request --KeyGate--> path and key are listed here, or 401, 403
        --FieldGate--> body --> read whole --> parsed --> checked by request_fields --> handed on
                                                      as it came, or 400

SGLang's own keys leave more open: every path that begins with /health, /ready or /metrics, OPTIONS
requests and websockets need none, a path that a release forgets to mark takes the normal key, and
its server's log and /server_info print them.

body of a chat --> empty arguments of calls are `{}` --> SGLang
               --> other arguments that are no object, or an end with the assistant: refused

SGLang answers empty arguments with 400, renders missing ones as null, and hands a last message of
the assistant to the model as one of the user. So histories are changed such that every chat
template can render them.
"""

import json
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import orjson

from mcore_rl.process.server_keys import ServerKeys, read_call_arguments
from mcore_rl.rollout.request_fields import FieldError, ModelBounds, check_request, refuse_grammars

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health"})
"""They say that the server is up, and nothing else."""
USER_PATHS = frozenset(
    {
        *(
            "/generate",
            "/generate_images",
            "/encode",
            "/classify",
            "/v1/completions",
            "/v1/chat/completions",
        ),
        *("/v1/embeddings", "/v1/classify", "/v1/score", "/v1/responses"),
        *("/v1/messages", "/v1/messages/count_tokens", "/v1/models", "/tokenize", "/v1/tokenize"),
        *("/detokenize", "/v1/detokenize", "/model_info", "/get_model_info"),
        *("/parse_function_call", "/separate_reasoning"),
        *("/health_generate", "/ready", "/ping", "/v1/loads", "/metrics", "/metrics/"),
    }
)
"""They sample, score, parse or describe; the user key or the admin key opens them."""
ADMIN_PATHS = frozenset(
    {
        *("/server_info", "/get_server_info", "/abort_request", "/flush_cache"),
        *("/pause_generation", "/continue_generation", "/begin_weight_update"),
        *("/end_weight_update", "/update_weights_from_tensor", "/update_weight_version"),
        *("/release_memory_occupation", "/resume_memory_occupation", "/weights_checker"),
        "/update_weights_from_disk",
        *("/start_profile", "/stop_profile", "/freeze_gc"),
    }
)
"""The paths that a run's own calls need, and those that check it; only the admin key opens them.

No key opens SGLang's others. Many of them unpickle what they are sent, read files or connect to
addresses that a request names, and no run needs them.
"""


_HISTORIES = {
    "/v1/chat/completions": "messages",
    "/v1/messages": "messages",
    "/v1/responses": "input",
}
"""Path -> the field with the conversation."""
_CONTINUES = ("continue_final_message", "add_generation_prompt")
"""Options of SGLang by which a client asks to go on with the assistant's message."""
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


class KeyGate:
    """ASGI middleware that answers requests without the right key itself, with 401 or 403."""

    def __init__(self, app: Application, keys: ServerKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        # Not from a Host header or a decoded URL: this is the path by which SGLang's routes match.
        refusal = find_refusal(scope["path"], _authorization(scope), self._keys)
        if refusal is None:
            await self._app(scope, receive, send)
            return
        status, reason = refusal
        body = json.dumps({"error": reason}).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def find_refusal(path: str, authorization: str, keys: ServerKeys) -> tuple[int, str] | None:
    """Return the HTTP status and reason for which a request is refused; None if it is admitted."""
    if path in OPEN_PATHS:
        return None
    if path in USER_PATHS:
        if keys.admits_user(authorization):
            return None
        return 401, f"{path} needs the server's key: Authorization: Bearer <key>"
    if path in ADMIN_PATHS:
        if keys.admits_admin(authorization):
            return None
        return 401, f"{path} needs the server's admin key, which only the run has"
    return 403, f"{path} is closed: mcore_rl/rollout/request_gates.py lists what is open"


def _authorization(scope: Scope) -> str:
    """Return the request's Authorization header; empty if it has none or several."""
    values = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
    return values[0].decode("latin-1") if len(values) == 1 else ""


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
        await self._app(_set_length(scope, admitted), _replay(admitted, receive), send)

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


def _set_length(scope: Scope, data: bytes) -> Scope:
    """Return the scope with the length of a body that replaces the one that came."""
    others = [header for header in scope.get("headers", ()) if header[0] != b"content-length"]
    return {**scope, "headers": [*others, (b"content-length", str(len(data)).encode())]}


def _replay(data: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body that was read, and then what else comes."""
    is_given = False

    async def replay_message() -> Any:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": data, "more_body": False}

    return replay_message


async def _answer(send: Send, status: int, reason: str) -> None:
    """Send an error in OpenAI's form."""
    error = {"message": reason, "type": "invalid_request_error", "param": None, "code": status}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
