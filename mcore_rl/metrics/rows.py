"""Files of JSON rows that outlive a killed run: every row is flushed, a torn last line is not read."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class RowFile:
    """Appends rows that hold a `step`; rows beyond `last_step` from before a resume are cut off first.

    last_step None starts over: an existing <name>.jsonl is kept as <name>.previous.jsonl.
    """

    def __init__(self, path: Path, last_step: int | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            if last_step is None:
                path.replace(path.with_suffix(".previous.jsonl"))
            else:
                _cut_after(path, last_step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, *rows: Mapping[str, Any]) -> None:
        self._file.writelines(_to_line(row) for row in rows)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows but a torn last one. ValueError names the line of any other that is no JSON object."""
    rows = []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines) or line.endswith("\n"):
                raise ValueError(f"{path}:{number}: not a JSON row: {line[:80]!r}") from error
    return rows


def _cut_after(path: Path, last_step: int) -> None:
    kept = [_to_line(row) for row in read_rows(path) if row["step"] <= last_step]
    shorter = path.with_suffix(".tmp")
    shorter.write_text("".join(kept), encoding="utf-8")
    shorter.replace(path)


def _to_line(row: Mapping[str, Any]) -> str:
    """JSON has no NaN or infinity: such numbers become null."""
    clean = {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()
    }
    return json.dumps(clean, ensure_ascii=False, default=str) + "\n"
