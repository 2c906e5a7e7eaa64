"""Appends rows to files of JSON lines and reads them.

    metrics.000001.jsonl  metrics.000002.jsonl  metrics.jsonl
    |--- rotated: whole rows, never written again ---|  rows are appended here

Every row is flushed, and a row torn by a kill is ignored. Steps never decrease from row to row, so
a resume cuts rows off the end only.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mcore_rl.process.disk import report_full_disk
from mcore_rl.process.log_files import find_segments, name_segment, read_number, rotate

_SURROGATE = re.compile("[\ud800-\udfff]")
_BLOCK_BYTES = 1 << 20
"""Read at once from the end of a file; rows longer than that are read block by block."""

Row = dict[str, Any]


class RowFile:
    """Appends rows that have a `step`. Rows beyond `last_step`, left by a resumed run, go first.

    With last_step=None the file starts over: an existing <name>.jsonl becomes
    <name>.previous.jsonl, and its segments likewise.
    """

    def __init__(self, path: Path, last_step: int | None, rotate_bytes: int = 0) -> None:
        """Raises DiskFullError if the disk is full, ValueError if an existing row is no JSON.

        rotate_bytes   once the file is that long, its rows become a segment; 0: never
        """
        self._path = path
        self._rotate_bytes = rotate_bytes
        with report_full_disk(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if last_step is None:
                _set_aside(path)
            else:
                _cut_after(path, last_step)
            self._file = path.open("ab")

    def write(self, *rows: Mapping[str, Any]) -> None:
        """Append `rows` and flush them. Raises DiskFullError if the disk is full."""
        with report_full_disk(self._path):
            self._file.writelines(_encode_row(row).encode() for row in rows)
            self._file.flush()
            if self._rotate_bytes and self._file.tell() >= self._rotate_bytes:
                self._file.close()
                rotate(self._path)
                self._file = self._path.open("ab")

    def close(self) -> None:
        """Close the file. Raises DiskFullError if a row that failed to be written fails again."""
        with report_full_disk(self._path):
            self._file.close()


def read_rows(path: Path) -> list[Row]:
    """Return all rows, those of the segments first; see `iter_rows`."""
    return list(iter_rows(path))


def has_rows(path: Path) -> bool:
    """Return whether the file or a segment of it is there."""
    return path.exists() or bool(find_segments(path))


def iter_rows(path: Path) -> Iterator[Row]:
    """Yield all rows in order, those of the segments first, except a torn last one.

    Raises ValueError naming a line that is no JSON row. One row is in memory at a time.

    Only "\\n" ends a line: str.splitlines would also cut at U+0085, U+2028 and U+2029, which JSON
    leaves unescaped in a string. Bytes are split, as a kill can tear the last row inside a
    character.
    """
    for part in list_parts(path):
        with part.open("rb") as file:
            for number, line in enumerate(file, start=1):
                is_whole = line.endswith(b"\n")
                try:
                    row = json.loads(line)
                except ValueError as error:  # no JSON, or no UTF-8
                    if is_whole:
                        raise ValueError(
                            f"{part}:{number}: not a JSON row: {_show(line)!r}"
                        ) from error
                else:
                    yield row


def iter_rows_backward(path: Path) -> Iterator[Row]:
    """Yield all rows, the last one first, except a torn last one.

    Files are read from their ends, as far as rows are taken. Raises ValueError naming a byte at
    which there is no JSON row.
    """
    for part in reversed(list_parts(path)):
        with part.open("rb") as file:
            for start, line in iter_lines_backward(file):
                row = _parse(part, start, line)
                if row is not None:
                    yield row


def list_parts(path: Path) -> list[Path]:
    """Return the files that hold the rows, in order."""
    current = [path] if path.exists() else []  # a kill may come between a rotation's two steps
    return [*find_segments(path), *current]


def iter_lines_backward(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield (first byte, line with its newline) from the last line to the first."""
    start = file.seek(0, os.SEEK_END)
    pieces: list[bytes] = []
    """Parts of one line, the last part first; its beginning is not read yet."""
    while start > 0:
        size = min(_BLOCK_BYTES, start)
        start -= size
        file.seek(start)
        block = file.read(size)
        stop = len(block)
        while (newline := block.rfind(b"\n", 0, stop)) >= 0:
            pieces.append(block[newline + 1 : stop])
            line = b"".join(reversed(pieces))
            if line:
                yield start + newline + 1, line
            pieces = [b"\n"]
            stop = newline
        pieces.append(block[:stop])
    line = b"".join(reversed(pieces))
    if line:
        yield 0, line


def _parse(path: Path, start: int, line: bytes) -> Row | None:
    """Return the row of a line, None of a torn one. Raises ValueError if it is no row."""
    try:
        return json.loads(line)
    except ValueError as error:
        if not line.endswith(b"\n"):
            return None
        raise ValueError(f"{path}: byte {start}: not a JSON row: {_show(line)!r}") from error


def _show(line: bytes) -> str:
    return line[:80].decode(errors="replace").removesuffix("\n")


def _cut_after(path: Path, last_step: int) -> None:
    """Take back rows beyond `last_step`, and a torn one, from the end on.

    Files are cut in place, the newest first: whenever this is killed, the rows that are left are
    the first ones, and the next call goes on.
    """
    for part in reversed(list_parts(path)):
        with part.open("rb+") as file:
            start, line = _find_last_kept(part, file, last_step)
            file.truncate(start + len(line))
            if line and not line.endswith(b"\n"):
                file.seek(0, os.SEEK_END)
                file.write(b"\n")
        if line:
            return
        if part != path:
            part.unlink()


def _find_last_kept(path: Path, file: BinaryIO, last_step: int) -> tuple[int, bytes]:
    """Return (first byte, line) of the last row that a resume keeps; (0, b"") if it keeps none."""
    for start, line in iter_lines_backward(file):
        row = _parse(path, start, line)
        if row is not None and row["step"] <= last_step:
            return start, line
    return 0, b""


def _set_aside(path: Path) -> None:
    """Rename the file and its segments to those of <name>.previous, which they replace.

    If this is killed, the next call renames the rest.
    """
    previous = path.with_suffix(".previous.jsonl")
    segments = find_segments(path)
    if not path.exists() and not segments:
        return
    if path.exists():
        path.replace(previous)
    numbers = [read_number(segment) for segment in segments]
    for segment, number in zip(segments, numbers, strict=True):
        segment.replace(name_segment(previous, number))
    for older in find_segments(previous):
        if read_number(older) > max(numbers, default=0):
            older.unlink()


def _encode_row(row: Mapping[str, Any]) -> str:
    """Return `row` as one line of valid UTF-8 JSON.

    JSON has no NaN or infinity: such numbers become null. UTF-8 has no lone surrogates: they are
    written as JSON escapes, which json.loads reads back as the same string. (A high surrogate that
    a low one follows is read back as the character that the pair stands for.)
    """
    clean = {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()
    }
    line = json.dumps(clean, ensure_ascii=False, default=str)
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", line) + "\n"
