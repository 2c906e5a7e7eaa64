"""The gate by itself; tests/scenarios/rollout/test_doors.py has it in front of SGLang."""

import asyncio
from typing import Any

import pytest

from mcore_rl.process.server_keys import ServerKeys
from mcore_rl.rollout.request_gates import (
    ADMIN_PATHS,
    OPEN_PATHS,
    USER_PATHS,
    KeyGate,
    find_refusal,
)

KEYS = ServerKeys("user", "admin")
USER = "Bearer user"
ADMIN = "Bearer admin"


def call(scope: dict[str, Any]) -> tuple[list[Any], bool]:
    """Return what the gate sent, and whether the application was reached."""
    sent: list[Any] = []
    reached: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope)

    async def receive() -> dict[str, Any]:
        raise AssertionError("the gate reads no body")

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(KeyGate(application, KEYS)(scope, receive, send))
    return sent, bool(reached)


def test_each_path_is_of_one_kind() -> None:
    assert not OPEN_PATHS & USER_PATHS and not USER_PATHS & ADMIN_PATHS


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [
        ("/health", "", None),
        ("/health/x", ADMIN, 403),
        ("/health_generate", "", 401),
        ("/ready", "", 401),
        ("/metrics", "", 401),
        ("/generate", "", 401),
        ("/generate", USER, None),
        ("/generate", ADMIN, None),
        ("/generate/", ADMIN, 403),
        ("//generate", ADMIN, 403),
        ("/flush_cache", USER, 401),
        ("/flush_cache", ADMIN, None),
        ("/update_weights_from_disk", USER, 401),
        ("/load_lora_adapter_from_tensors", ADMIN, 403),
        ("/docs", ADMIN, 403),
        ("", ADMIN, 403),
    ],
)
def test_who_may_ask_what(path: str, header: str, status: int | None) -> None:
    refusal = find_refusal(path, header, KEYS)
    assert (None if refusal is None else refusal[0]) == status


@pytest.mark.parametrize("method", ["GET", "OPTIONS", "POST", "HEAD"])
def test_a_refused_request_never_reaches_the_application(method: str) -> None:
    scope = {"type": "http", "method": method, "path": "/flush_cache", "headers": []}
    (start, body), reached = call(scope)
    assert not reached and start["status"] == 401
    assert b"needs the server's admin key" in body["body"]
    scope["headers"] = [(b"Authorization", ADMIN.encode())]
    assert call(scope) == ([], True)
    scope["headers"] *= 2
    assert call(scope)[0][0]["status"] == 401


def test_websockets_are_closed_and_the_lifespan_passes() -> None:
    headers = [(b"authorization", ADMIN.encode())]
    sent, reached = call({"type": "websocket", "path": "/v1/realtime", "headers": headers})
    assert sent == [{"type": "websocket.close", "code": 1008}] and not reached
    assert call({"type": "lifespan"}) == ([], True)
