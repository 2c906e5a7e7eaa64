"""Keeps the beginning and the end of a program's output."""

import asyncio

_CHUNK_BYTES = 64 * 1024


class BoundedOutput:
    """At most `most_bytes` of an output: the first half as it began, the second as it ended."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self._num_dropped = 0

    async def read_all(self, stream: asyncio.StreamReader) -> None:
        """Take everything up to the end of a stream; memory stays bounded."""
        while chunk := await stream.read(_CHUNK_BYTES):
            self.add(chunk)

    def add(self, chunk: bytes) -> None:
        room = self._most_bytes - self._most_bytes // 2 - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        if (excess := len(self._tail) - self._most_bytes // 2) > 0:
            del self._tail[:excess]
            self._num_dropped += excess

    @property
    def text(self) -> str:
        """The output, with a note where some was left out."""
        note = f"\n[{self._num_dropped} bytes left out]\n".encode() if self._num_dropped else b""
        return bytes(self._head + note + self._tail).decode(errors="replace")
