"""Reads a corpus of passages: one JSON object a line, with `id` and `contents`.

The format is that of Search-R1: `contents` begins with the title, in a line of its own.
"""

import json
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
"""A line of the corpus: id, contents, and whatever else it has."""
_SHOWN_LEN = 80


@dataclass(frozen=True)
class Hit:
    """A passage that was found, and its score: the higher, the better."""

    document: Row
    score: float


@dataclass(frozen=True)
class Line:
    """A row of a corpus and the bytes that it takes, its newline included."""

    start: int
    stop: int
    row: Row


def read_lines(corpus: Path, start: int = 0, first_number: int = 1) -> Iterator[Line]:
    """Yield the rows from byte `start` on, which is the beginning of line `first_number`.

    Raises ValueError naming file and line if a row is broken.
    """
    with corpus.open("rb") as file:
        file.seek(start)
        for number, raw in enumerate(file, start=first_number):
            yield Line(start, start + len(raw), parse_row(raw, f"{corpus}:{number}"))
            start += len(raw)


def parse_row(raw: bytes, place: str) -> Row:
    """Return a row of a corpus. Raises ValueError, which begins with `place`, if it is broken."""
    try:
        row = json.loads(raw)
    except ValueError as error:
        raise ValueError(_complaint(place, raw, f"is not JSON ({error})")) from None
    if not isinstance(row, dict):
        raise ValueError(_complaint(place, raw, "is not a JSON object"))
    if not isinstance(row.get("contents"), str) or not row["contents"].strip():
        raise ValueError(_complaint(place, raw, "has no text as `contents`"))
    if not isinstance(row.get("id"), str | int):
        raise ValueError(_complaint(place, raw, "has neither text nor a number as `id`"))
    return row


def _complaint(place: str, raw: bytes, problem: str) -> str:
    shown = raw[:_SHOWN_LEN].decode(errors="replace").rstrip()
    return (
        f'{place}: the line {problem}: {shown!r}; each line must be {{"id": ..., "contents": '
        '"title\\ntext"}: mend it or leave it out, then run the same command again'
    )


class MappedFile:
    """The bytes of a file, mapped: the kernel drops pages that nobody reads."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._bytes = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)

    def row(self, start: int, stop: int) -> Row:
        """Return the row of a corpus that lies at these bytes."""
        return json.loads(self._bytes[start:stop])

    def close(self) -> None:
        self._bytes.close()
        self._file.close()


def title_and_text(row: Row) -> tuple[str, str]:
    """Return a passage's title, without quotation marks around it, and its text."""
    title, _, text = str(row.get("contents") or "").partition("\n")
    return title.strip('"'), text
