"""Writes server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from typing import Any

import orjson

COMMENT = b": the policy generates\n\n"
DONE = b"data: [DONE]\n\n"


def event(data: Any, name: str = "") -> bytes:
    """Return an event with `data` as JSON, which has no line breaks."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + orjson.dumps(data) + b"\n\n"
