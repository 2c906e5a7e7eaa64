"""Secrets are hidden in text that a run writes; the rest stays."""

import logging

import pytest

from mcore_rl.process import redaction
from mcore_rl.process.redaction import (
    RedactingFormatter,
    is_secret_name,
    redact,
    remember_environment,
    remember_secret,
)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_known", set())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("GET http://me:pass@host:80/v1 failed", "GET http://***@host:80/v1 failed"),
        ("sqlite+x://u:p%40q@db", "sqlite+x://***@db"),
        ("https://h/a?token=abc&page=2", "https://h/a?token=***&page=2"),
        ("https://h/a?page=2&X-Amz-Signature=ab/c", "https://h/a?page=2&X-Amz-Signature=***"),
        ("(https://h/?api_key='x)", "(https://h/?api_key='x)"),
        ("http://127.0.0.1:30000/generate?n=2", "http://127.0.0.1:30000/generate?n=2"),
        ("Authorization: Bearer abc.def-123", "Authorization: Bearer ***"),
        ("mail me@host, file:///a/b@c", "mail me@host, file:///a/b@c"),
        ("no secret here", "no secret here"),
    ],
)
def test_credentials_in_urls_and_headers_are_hidden(text: str, expected: str) -> None:
    assert redact(text) == expected
    assert redact(expected) == expected


@pytest.mark.parametrize(
    "name", ["api_key", "key", "HF_TOKEN", "authToken", "password", "client-secret", "apikey"]
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("num_tokens", "tokenizer", "key_file", "monkey", "author", "secretary", "keyword", ""),
        *("moe_token_dispatcher_type", "RAY_AUTH_MODE"),
    ],
)
def test_names_of_other_things(name: str) -> None:
    assert not is_secret_name(name)


def test_known_values_are_hidden_the_longest_first() -> None:
    for value in ("hunter2", "hunter2hunter2", "short"):
        remember_secret(value)
    assert redact("a short hunter2hunter2, hunter2") == "a short ***, ***"


def test_the_environment_is_known_by_its_names() -> None:
    remember_environment(
        {
            "WANDB_API_KEY": "0123456789abcdef",
            "RAY_AUTH_MODE": "disabled",
            "SSH_AUTH_SOCK": "/tmp/ssh/agent.12",
            "HOME": "/home/somebody",
        }
    )
    text = "0123456789abcdef disabled /tmp/ssh/agent.12 /home/somebody"
    assert redact(text) == "*** disabled /tmp/ssh/agent.12 /home/somebody"


def test_a_log_has_no_secrets_in_messages_or_tracebacks() -> None:
    remember_secret("hunter2hunter2")
    try:
        raise ValueError("at http://me:pass@host: hunter2hunter2")
    except ValueError:
        record = logging.getLogger().makeRecord(
            "a", logging.ERROR, "f", 1, "%s", ("hunter2hunter2",), __import__("sys").exc_info()
        )
    text = RedactingFormatter("%(message)s").format(record)
    assert "hunter2" not in text and "me:pass" not in text
    assert text.startswith("***\n") and text.endswith("ValueError: at http://***@host: ***")
