"""Appends rows to files of JSON lines and reads them. Every row is flushed, and a row torn by a
kill is ignored.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_rl.process.disk import reporting_full_disk

_SURROGATE = re.compile("[\ud800-\udfff]")


class RowFile:
    """Appends rows that have a `step`. Rows beyond `last_step`, left by a resumed run, go first.

    With last_step=None the file starts over: an existing <name>.jsonl becomes
    <name>.previous.jsonl.
    """

    def __init__(self, path: Path, last_step: int | None) -> None:
        """Raises DiskFullError if the disk is full, ValueError if an existing row is no JSON."""
        self._path = path
        with reporting_full_disk(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                if last_step is None:
                    path.replace(path.with_suffix(".previous.jsonl"))
                else:
                    _cut_after(path, last_step)
            self._file = path.open("a", encoding="utf-8")

    def write(self, *rows: Mapping[str, Any]) -> None:
        """Append `rows` and flush them. Raises DiskFullError if the disk is full."""
        with reporting_full_disk(self._path):
            self._file.writelines(_to_line(row) for row in rows)
            self._file.flush()

    def close(self) -> None:
        """Close the file. Raises DiskFullError if a row that failed to be written fails again."""
        with reporting_full_disk(self._path):
            self._file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return all rows except a torn last one. Raises ValueError naming a line that is no JSON row.

    Only "\\n" ends a line: str.splitlines would also cut at U+0085, U+2028 and U+2029, which JSON
    leaves unescaped in a string. Bytes are split, as a kill can tear the last row inside a
    character.
    """
    rows = []
    *lines, torn = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:  # no JSON, or no UTF-8
            raise ValueError(f"{path}:{number}: not a JSON row: {_shown(line)!r}") from error
    try:
        return [*rows, json.loads(torn)]
    except ValueError:
        return rows


def _shown(line: bytes) -> str:
    return line[:80].decode(errors="replace")


def _cut_after(path: Path, last_step: int) -> None:
    kept = [_to_line(row) for row in read_rows(path) if row["step"] <= last_step]
    shorter = path.with_suffix(".tmp")
    shorter.write_text("".join(kept), encoding="utf-8")
    shorter.replace(path)


def _to_line(row: Mapping[str, Any]) -> str:
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
