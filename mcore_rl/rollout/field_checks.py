"""Checks of one field of a request each: numbers, flags, texts, token ids, biases."""

import math
from collections.abc import Callable
from typing import Any

from mcore_rl.types.stops import MOST_STOP_LEN, MOST_STOPS

_SHOWN = 64


class FieldError(ValueError):
    """A field of a request is out of bounds; the message names field, value and bound."""


Check = Callable[[str, Any], None]
"""Takes a field's name and its value, which is not None; raises FieldError."""


def bound_number(least: float, most: float, *, also: tuple[float, ...] = ()) -> Check:
    def check(name: str, value: Any) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and (value in also or (math.isfinite(value) and least <= value <= most)):
            return
        raise FieldError(f"{name}={show(value)}: {_range(least, most, also)}, a number")

    return check


def bound_whole(least: int, most: int, *, also: tuple[int, ...] = ()) -> Check:
    def check(name: str, value: Any) -> None:
        if type(value) is int and (value in also or least <= value <= most):
            return
        raise FieldError(f"{name}={show(value)}: {_range(least, most, also)}, a whole number")

    return check


def _range(least: float, most: float, also: tuple[float, ...]) -> str:
    return "".join(f"{each} or " for each in also) + f"{least} to {most}"


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise FieldError(f"{name}={show(value)}: true or false")


def bound_text(most_len: int) -> Check:
    def check(name: str, value: Any) -> None:
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(each, str) and len(each) <= most_len for each in values):
            raise FieldError(f"{name}={show(value)}: a text of at most {most_len} characters")

    return check


def check_stops(name: str, value: Any) -> None:
    texts = value if isinstance(value, list) else [value]
    if len(texts) > MOST_STOPS:
        raise FieldError(f"{name}: {len(texts)} texts, at most {MOST_STOPS}")
    for text in texts:
        if not isinstance(text, str) or not 1 <= len(text) <= MOST_STOP_LEN:
            raise FieldError(f"{name}={show(value)}: texts of 1 to {MOST_STOP_LEN} characters each")


def bound_ids(vocab_size: int) -> Check:
    """Return a check of token ids, in a list or in lists of a list, or of one id alone."""

    def check(name: str, value: Any) -> None:
        ids = value if isinstance(value, list) else [value]
        if ids and isinstance(ids[0], list):
            for number, each in enumerate(ids):
                check(f"{name}[{number}]", each if isinstance(each, list) else [each])
            return
        if not set(map(type, ids)) <= {int}:
            bad = next(each for each in ids if type(each) is not int)
            raise FieldError(f"{name}={show(bad)}: token ids are 0 to {vocab_size - 1}")
        for bad in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= bad < vocab_size:
                raise FieldError(f"{name}={bad}: token ids are 0 to {vocab_size - 1}")

    return check


def bound_ids_or_texts(vocab_size: int) -> Check:
    check_ids = bound_ids(vocab_size)

    def check(name: str, value: Any) -> None:
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, int | float | list):
            check_ids(name, value)

    return check


def bound_biases(vocab_size: int) -> Check:
    """Return a check of OpenAI's logit_bias: numbers by token id, which comes as text."""
    check_bias = bound_number(-100, 100)

    def check(name: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise FieldError(f"{name}={show(value)}: an object of biases by token id")
        for token, bias in value.items():
            if not (token.isascii() and token.isdigit() and len(token) < 20):
                raise FieldError(f"{name}[{show(token)}]: token ids are 0 to {vocab_size - 1}")
            if int(token) >= vocab_size:
                raise FieldError(f"{name}[{token}]: token ids are 0 to {vocab_size - 1}")
            check_bias(f"{name}[{token}]", bias)

    return check


def show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
