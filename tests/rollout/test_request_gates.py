"""The gate by itself: what it answers, and that what it admits arrives as it was sent."""

import asyncio
import json
from typing import Any

import pytest

from mcore_rl.rollout import request_gates as field_gate
from mcore_rl.rollout.request_fields import ModelBounds
from mcore_rl.rollout.request_gates import CHECKED_PATHS, USER_PATHS, FieldGate

DESCRIBING = {
    *("/v1/models", "/model_info", "/get_model_info", "/health_generate", "/ready", "/ping"),
    *("/v1/loads", "/metrics", "/metrics/"),
}
CHAT = "/v1/chat/completions"
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}


def send(path: str, *parts: bytes, has_grammar: bool = False) -> tuple[int, Any]:
    """Return the status and the error of the gate, or 200 and the body that the application got."""
    sent: list[Any] = []
    reached: list[bytes] = []
    messages = [
        {"type": "http.request", "body": part, "more_body": number < len(parts) - 1}
        for number, part in enumerate(parts)
    ]

    async def application(scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            reached.append(message["body"])
            more = message["more_body"]
        assert await receive() == {"type": "http.disconnect"}

    async def receive() -> Any:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def collect(message: Any) -> None:
        sent.append(message)

    gate = FieldGate(application, lambda: ModelBounds(98, 1024), has_grammar)
    asyncio.run(gate({"type": "http", "path": path}, receive, collect))
    if reached:
        assert not sent
        return 200, b"".join(reached)
    return sent[0]["status"], json.loads(sent[1]["body"])["error"]["message"]


def test_every_path_that_takes_json_of_users_is_checked() -> None:
    assert CHECKED_PATHS | DESCRIBING | {"/generate_images"} == USER_PATHS


@pytest.mark.parametrize("path", sorted(CHECKED_PATHS))
def test_what_is_out_of_bounds_is_answered_with_400(path: str) -> None:
    assert send(path, b'{"top_logprobs": 1000}') == (
        400,
        "top_logprobs=1000: 0 to 98, a whole number",
    )


def test_an_admitted_body_arrives_as_it_was_sent() -> None:
    assert send(CHAT, b'{"top_log', b'probs" :3, "user":"\xc3\xbc"}') == (
        200,
        b'{"top_logprobs" :3, "user":"\xc3\xbc"}',
    )
    assert send("/health_generate", b"\xff") == (200, b"\xff")


def test_empty_arguments_of_a_call_arrive_as_an_empty_object() -> None:
    def body(arguments: str) -> bytes:
        call = {"function": {"name": "look", "arguments": arguments}}
        return json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}, {}]}).encode()

    status, reached = send(CHAT, body(""))
    assert status == 200 and json.loads(reached) == json.loads(body("{}"))
    assert send(CHAT, body("7"))[0] == 400


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"top_p": NaN}', b'{"temperature": Infinity}', b"[" * 100000, b"\xff\xfe{\0}\0"],
)
def test_what_is_no_json_is_answered_with_400(body: bytes) -> None:
    status, message = send(CHAT, body)
    assert status == 400 and message.startswith("the body is no JSON: ")


def test_a_body_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(field_gate, "MOST_BODY_BYTES", 1 << 20)
    assert send(CHAT, b"x" * (1 << 19), b"x" * (1 << 19), b"x") == (
        413,
        "the body is larger than 1 MiB",
    )


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"response_format": SCHEMA}, "response_format"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"text": {"format": SCHEMA}}, "text.format"),
        ({"output_config": {"format": SCHEMA}}, "output_config.format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [{}, {"type": "function", "function": {"strict": True}}]}, "tools[1].strict"),
        ({"regex": "a+"}, "regex"),
        ({"sampling_params": {"json_schema": "{}"}}, "json_schema"),
    ],
)
def test_a_server_without_grammars_says_how_to_start_one_with(body: Any, name: str) -> None:
    data = json.dumps(body).encode()
    status, message = send("/generate", data)
    assert status == 400
    assert message.startswith(f"{name}=")
    assert "start it by `mcore-rl serve --grammar-backend xgrammar`" in message
    assert send("/generate", data, has_grammar=True) == (200, data)


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "text"}, "tool_choice": "auto"},
        {"tool_choice": {"type": "auto"}, "tools": [{"function": {"strict": False}}]},
        {"tool_choice": "none", "regex": None, "text": "a prompt"},
    ],
)
def test_what_needs_no_grammar_is_admitted_without(body: Any) -> None:
    data = json.dumps(body).encode()
    assert send(CHAT, data) == (200, data)
