"""Reads a file of rows, with its segments, while a run may append to it, rotate it or cut it.

    samples.000001.jsonl  samples.jsonl         a position counts the bytes of all parts, in order
    0 ------------------> 268435511 ------> ...

A run that resumes cuts rows off the end, or sets the whole file aside: then all rows are read anew.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.process.log_files import find_segments

BLOCK_BYTES = 4 << 20
_TAIL_BYTES = 4096
"""Bytes before the end of what was read, by which a file that was cut and grew again is found."""


@dataclass
class _Part:
    """A file of rows: position of its first byte, number and last bytes of what was read of it."""

    inode: int
    base: int
    num_read: int = 0
    tail: bytes = b""


@dataclass(frozen=True)
class NewRows:
    """Whole lines that were not read before, with their positions.

    is_restart   the file is another one: whatever was made of earlier rows is void
    is_end       there was nothing more to read
    """

    lines: Sequence[tuple[int, bytes]]
    is_restart: bool
    is_end: bool


class FollowedRows:
    """Hands out the lines of `path` and its segments, each once; a torn last line waits."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts: list[_Part] = []

    def read_new(self) -> NewRows:
        """Return the next lines, of a block at most unless a line is longer."""
        paths = self._list_paths()
        is_restart = not self._goes_on(paths)
        if is_restart:
            self._parts = []
        for place, path in enumerate(paths):
            if place == len(self._parts):
                last = self._parts[-1] if self._parts else None
                base = last.base + last.num_read if last else 0
                self._parts.append(_Part(path.stat().st_ino, base))
            lines = _read_lines(path, self._parts[place])
            if lines:
                return NewRows(lines, is_restart, False)
        return NewRows([], is_restart, True)

    def read_at(self, position: int, length: int) -> bytes:
        """Return bytes of one part; fewer if the file was cut since."""
        paths = self._list_paths()
        for place in reversed(range(min(len(paths), len(self._parts)))):
            part = self._parts[place]
            if part.base <= position:
                with paths[place].open("rb") as file:
                    file.seek(position - part.base)
                    return file.read(length)
        return b""

    def list_bases(self) -> list[int]:
        """Return the position at which each part begins."""
        return [part.base for part in self._parts]

    def _list_paths(self) -> list[Path]:
        current = [self._path] if self._path.exists() else []
        return [*find_segments(self._path), *current]

    def _goes_on(self, paths: Sequence[Path]) -> bool:
        """Return whether all that was read is still there, unchanged."""
        if len(paths) < len(self._parts):
            return False
        for part, path in zip(self._parts, paths, strict=False):
            status = path.stat()
            if status.st_ino != part.inode or status.st_size < part.num_read:
                return False
        if not self._parts:
            return True
        last = self._parts[-1]
        with paths[len(self._parts) - 1].open("rb") as file:
            file.seek(last.num_read - len(last.tail))
            return file.read(len(last.tail)) == last.tail


def _read_lines(path: Path, part: _Part) -> list[tuple[int, bytes]]:
    """Read on in a part, and return its next whole lines without their newlines."""
    size = BLOCK_BYTES
    with path.open("rb") as file:
        while True:
            file.seek(part.num_read)
            block = file.read(size)
            stop = block.rfind(b"\n") + 1
            if stop or len(block) < size:
                break
            size *= 2
    if not stop:
        return []
    lines = list(_split(block[:stop], part.base + part.num_read))
    part.num_read += stop
    part.tail = (part.tail + block[:stop][-_TAIL_BYTES:])[-_TAIL_BYTES:]
    return lines


def _split(block: bytes, position: int) -> Iterator[tuple[int, bytes]]:
    for line in block.split(b"\n")[:-1]:
        yield position, line
        position += len(line) + 1
