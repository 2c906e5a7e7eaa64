"""The normal form of messages, in which the recorder compares conversations."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import orjson

from mcore_rl.agents.messages import Message, Tool


def fingerprints(messages: Sequence[Message], tools: Sequence[Tool]) -> list[bytes]:
    """Return a hash of the first 0, 1, 2, ... messages, equal for those that differ in form alone.

    Reasoning is left out: clients may drop that of earlier answers, and it stays what it was.
    """
    hashes = [_hash(b"", list(tools))]
    for message in messages:
        hashes.append(with_message(hashes[-1], message))
    return hashes


def with_message(before: bytes, message: Message) -> bytes:
    """Return the hash of a conversation whose hash was `before`, with one more message."""
    return _hash(before, normal(message))


def _hash(before: bytes, value: Any) -> bytes:
    return hashlib.blake2b(_json(value), digest_size=16, key=before).digest()


def _json(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # numbers beyond 64 bits, halves of surrogate pairs
        return json.dumps(value, sort_keys=True).encode()


def normal(message: Message) -> dict[str, Any]:
    """Return what counts of a message: role, text, tool calls and the call that it answers."""
    form: dict[str, Any] = {"role": message.get("role"), "content": _text(message.get("content"))}
    if calls := message.get("tool_calls"):
        form["tool_calls"] = [
            {"id": call.get("id"), **_function(call.get("function") or {})} for call in calls
        ]
    if message.get("tool_call_id"):
        form["tool_call_id"] = message["tool_call_id"]
    return form


def _text(content: Any) -> Any:
    """Return parts of text joined; None and no parts are the empty text."""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if part.get("type") in (None, "text")]
        return "".join(map(str, texts)) if len(texts) == len(content) else content
    return content or ""


def _function(function: Any) -> dict[str, Any]:
    arguments = function.get("arguments")
    return {
        "name": function.get("name"),
        "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
    }
