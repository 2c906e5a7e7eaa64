"""Frames between a pool and its workers: four bytes of length, then that much JSON."""

import asyncio
import json
import struct
from typing import Any

MAX_FRAME_BYTES = 256 * 1024 * 1024
_LENGTH = struct.Struct("!I")


def encode(value: Any) -> bytes:
    """Return the frame of a value of JSON; arrays and scalars of numpy become lists and numbers.

    Raises ValueError if JSON has no form for it, or if the frame is longer than MAX_FRAME_BYTES.
    """
    try:
        body = json.dumps(value, default=_plain).encode()
    except TypeError as error:
        raise ValueError(
            f"{error}: tasks, messages and metrics travel as JSON; use text, numbers, lists and "
            "mappings with text as keys"
        ) from error
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(
            f"a message of {len(body)} bytes between a pool and its worker; at most "
            f"{MAX_FRAME_BYTES}: pass the name of a file instead of its content"
        )
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """Return the next frame's value, or None if the other side has closed or died."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return json.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    raise TypeError(f"a {type(value).__name__} is not JSON")
