"""Admits HTTP requests to an SGLang server by key: what is not listed here is refused.

SGLang's own keys leave more open: every path that begins with /health, /ready or /metrics, OPTIONS
requests and websockets need none, a path that a release forgets to mark takes the normal key, and
its server's log and /server_info print them. This gate sits in front of SGLang's application.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from mcore_rl.process.server_keys import ServerKeys

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
        refusal = refusal_of(scope["path"], _authorization(scope), self._keys)
        if refusal is None:
            await self._app(scope, receive, send)
            return
        status, reason = refusal
        body = json.dumps({"error": reason}).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def refusal_of(path: str, authorization: str, keys: ServerKeys) -> tuple[int, str] | None:
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
    return 403, f"{path} is closed: mcore_rl/rollout/key_gate.py lists what is open"


def _authorization(scope: Scope) -> str:
    """Return the request's Authorization header; empty if it has none or several."""
    values = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
    return values[0].decode("latin-1") if len(values) == 1 else ""
