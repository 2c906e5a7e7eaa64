"""Reads the JSON bodies that strangers send to a server of ours."""

import json
from typing import Any

import orjson


def parse_json(data: bytes) -> Any:
    """Return the value in a body. Raises ValueError for all else, nested too deeply included."""
    try:
        return json.loads(data)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"the body is no JSON: {error}") from None
    except RecursionError:
        raise ValueError("the body is nested too deeply") from None


def read_call_arguments(given: object) -> str:
    """Return the arguments of a tool call in a history, the text of an object; none are `{}`.

    Raises ValueError with the reason if they are anything else: chat templates read an object.
    """
    if given is None or (isinstance(given, str) and not given.strip()):
        return "{}"
    if not isinstance(given, str):
        raise ValueError(f"must be a string of JSON, not {type(given).__name__}")
    try:
        value: Any = orjson.loads(given)
    except orjson.JSONDecodeError as error:
        raise ValueError(
            f"must be an object of JSON, but {given[:40]!r} is no JSON: {error}"
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"must be an object of JSON, as templates want, not {given[:40]!r}")
    return given
