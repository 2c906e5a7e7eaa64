"""Carries plain Python values through JSON without losing their kinds.

The text of this file also begins the driver that runs inside a sandbox (code_driver.py), so it
imports nothing of this package.
"""

from typing import Any

_KINDS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def pack(value: Any) -> Any:
    """Return a value that JSON can hold. Raises TypeError for an object that is not plain."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return ["dict", [[pack(key), pack(entry)] for key, entry in value.items()]]
    for name, kind in _KINDS.items():
        if isinstance(value, kind):
            return [name, [pack(entry) for entry in value]]
    raise TypeError(f"{type(value).__name__} is no plain value")


def unpack(packed: Any) -> Any:
    """Return the value that was packed.

    Raises ValueError or TypeError for anything that `pack` does not return.
    """
    if packed is None or isinstance(packed, bool | int | float | str):
        return packed
    if not isinstance(packed, list) or len(packed) != 2 or not isinstance(packed[1], list):
        raise ValueError(f"{packed!r:.100} was not packed")
    kind, entries = packed
    if kind == "dict":
        return {unpack(key): unpack(entry) for key, entry in entries}
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"{kind!r:.100} is no kind of value")
    return _KINDS[kind](unpack(entry) for entry in entries)
