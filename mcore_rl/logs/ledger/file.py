"""Appends records to a ledger, and reads them back whatever a crash left.

    {"is":"sync","version":3,"sum":"5b1e09c2"}     one line for each record
                             |--- CRC-32 of the line's other bytes, continued from the line before

So a line that was changed, is missing or has moved is found. A crash may tear the last line: the
next launch cuts it off, and tells the bytes in its first record.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

from mcore_rl.logs.rows import iter_lines_backward, list_parts
from mcore_rl.process.disk import report_full_disk
from mcore_rl.process.log_files import rotate

NAME = "ledger.jsonl"
TORN = "torn"
"""Kind of the record that `read_records` makes of a torn last line."""
Record = Mapping[str, Any]
_SUM = b',"sum":"'
_SUM_LEN = 8
_END = b'"}\n'
_BUFFER_BYTES = 1 << 20


class LedgerFile:
    """Appends records. They are in the file, and on the disk, once `commit` returns."""

    def __init__(self, path: Path, rotate_bytes: int = 0) -> None:
        """Open the file, and cut off a torn last line.

        rotate_bytes   once the file is that long, it becomes a segment; 0: never

        Raises ValueError if the last line is damaged, DiskFullError if the disk is full.
        """
        self._path = path
        self._rotate_bytes = rotate_bytes
        with report_full_disk(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.torn_bytes = _cut_torn(path)
            self._sum = _read_last_sum(path)
            self._file = path.open("ab", _BUFFER_BYTES)

    def append(self, record: Record) -> None:
        """Append a record, which may wait in memory until `commit`."""
        data = json.dumps(record, separators=(",", ":"), allow_nan=False)[:-1].encode()
        self._sum = crc32(data, self._sum)
        with report_full_disk(self._path):
            self._file.write(b"%b%b%08x%b" % (data, _SUM, self._sum, _END))

    def commit(self) -> None:
        """Bring all records to the disk. Raises DiskFullError if it is full."""
        with report_full_disk(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            if self._rotate_bytes and self._file.tell() >= self._rotate_bytes:
                self._file.close()
                rotate(self._path)
                self._file = self._path.open("ab", _BUFFER_BYTES)

    def close(self) -> None:
        """Commit and close."""
        self.commit()
        self._file.close()


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a ledger in order, then one of the kind TORN if its last line is torn.

    Raises ValueError naming file and line if a line before that is damaged.
    """
    parts = list_parts(path)
    before = 0
    for part in parts:
        with part.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n") and part == parts[-1]:
                    yield {"is": TORN, "bytes": len(line)}
                    return
                data, found = _split(line)
                before = crc32(data, before)
                if found != before:
                    raise ValueError(
                        f"{part}:{number}: the ledger is damaged: this line was changed, or lines"
                        " before it are missing. Nothing after it can be proved; bring the file"
                        " back from a copy. Runs go on without"
                    )
                yield json.loads(data + b"}")


def _split(line: bytes) -> tuple[bytes, int]:
    """Return the bytes that a line's sum is made of, and the sum; -1 if there is none."""
    data, _, end = line.rpartition(_SUM)
    if len(end) != _SUM_LEN + len(_END) or not end.endswith(_END):
        return data, -1
    try:
        return data, int(end[:_SUM_LEN], 16)
    except ValueError:
        return data, -1


def _cut_torn(path: Path) -> int:
    """Cut off what follows the last newline; return how many bytes that was."""
    if not path.exists():
        return 0
    with path.open("rb+") as file:
        for start, line in iter_lines_backward(file):
            if line.endswith(b"\n"):
                return 0
            file.truncate(start)
            return len(line)
    return 0


def _read_last_sum(path: Path) -> int:
    """Return the sum that the next line continues from. Raises ValueError if it cannot be read."""
    for part in reversed(list_parts(path)):
        with part.open("rb") as file:
            for _, line in iter_lines_backward(file):
                found = _split(line)[1]
                if found < 0:
                    raise ValueError(
                        f"{part}: the last line of the ledger is damaged: bring the file back from"
                        f" a copy, or move {path.stem}*{path.suffix} away to begin new books"
                    )
                return found
    return 0
