"""Reads fields of a request's body; what is missing, malformed or unsupported is named."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from mcore_rl.agents.gateway.errors import BadRequest, unsupported
from mcore_rl.types.stops import MOST_STOP_LEN, MOST_STOPS

T = TypeVar("T")

Body = Mapping[str, Any]
_NAMES = {str: "a string", int: "an integer", bool: "a boolean", dict: "an object", list: "a list"}
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MOST_NAMES = 32
"""Names of ignored parameters that an answer lists."""


def optional(body: Body, name: str, kind: type[T], where: str = "") -> T | None:
    """Return a field, or None if it is missing or null."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise BadRequest(where + name, f"must be {_NAMES[kind]}, not {_short(value)}")
    return value


def required(body: Body, name: str, kind: type[T], where: str = "") -> T:
    """Return a field that must be there."""
    value = optional(body, name, kind, where)
    if value is None:
        raise BadRequest(where + name, "is missing", "missing_required_parameter")
    return value


def objects(values: Sequence[Any] | None, where: str) -> Iterable[tuple[str, Body]]:
    """Yield the place and the value of each entry of a list of objects."""
    for number, value in enumerate(values or ()):
        place = f"{where}[{number}]"
        if not isinstance(value, dict):
            raise BadRequest(place, f"must be an object, not {_short(value)}")
        yield place, value


def max_tokens(body: Body, *names: str) -> int | None:
    """Return the bound that the first of these fields sets; it must be positive."""
    for name in names:
        value = optional(body, name, int)
        if value is not None:
            if value < 1:
                raise BadRequest(name, f"must be at least 1, not {value}")
            return value
    return None


def stop_texts(body: Body, name: str) -> tuple[str, ...]:
    """Return the texts that end the response: one, a list, or none."""
    value = body.get(name)
    texts = [value] if isinstance(value, str) else value if value is not None else []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise BadRequest(name, "must be a text or a list of texts, none of them empty")
    if len(texts) > MOST_STOPS:
        raise BadRequest(name, f"has {len(texts)} texts, at most {MOST_STOPS}")
    longest = max(map(len, texts), default=0)
    if longest > MOST_STOP_LEN:
        raise BadRequest(name, f"has a text of {longest} characters, at most {MOST_STOP_LEN}")
    return tuple(texts)


def refuse(body: Body, remedies: Mapping[str, str]) -> None:
    """Raise BadRequest if one of these fields is set to anything but null, false, 0 or empty."""
    for name, remedy in remedies.items():
        if body.get(name):
            raise unsupported(name, remedy)


def ignored_names(body: Body, known: frozenset[str]) -> tuple[str, ...]:
    """Return the names, sorted, of the fields that are set and not `known`: those without effect.

    Names that do not look like one are left out, so that they fit into a header.
    """
    found = [
        name
        for name, value in body.items()
        if value is not None and name not in known and _PLAIN_NAME.fullmatch(name)
    ]
    return tuple(sorted(found)[:_MOST_NAMES])


def joined_text(content: Any, where: str, kinds: frozenset[str]) -> str:
    """Return the text of a message: a string, null, or parts of text, which are joined.

    kinds: the types of parts that hold text; others, such as images, are refused by name.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(where, f"must be a string or a list of parts, not {_short(content)}")
    return "".join(part_text(part, place, kinds) for place, part in objects(content, where))


def part_text(part: Body, place: str, kinds: frozenset[str]) -> str:
    """Return the text of a part of a message, which must be of one of these kinds."""
    kind = required(part, "type", str, f"{place}.")
    if kind not in kinds:
        raise unsupported(f"{place}.type={kind[:64]}", "the policy reads text only")
    return required(part, "text", str, f"{place}.")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
