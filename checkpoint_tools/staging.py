"""An output folder under a temporary name: what is finished in it, so that a run that was killed goes on.

<out>.partial/            files of full size, filled unit by unit, in any order
<out>.partial/.journal    first line: a digest of what is to be made; then a line per finished unit
<out>                     the same folder, renamed when everything was checked
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from zlib_ng import zlib_ng

from checkpoint_tools.output import Done, OutputFile, Unit
from checkpoint_tools.reader import Record
from mcore_rl.slices.hf.checksums import FileSums, Span, sum_ranges

PARTIAL = ".partial"
JOURNAL = ".journal"
LOCK_WAIT_S = 10.0


class Staging:
    """One run's hold on `<out>.partial`. ValueError if `out` exists, or another process writes to it."""

    def __init__(self, out: Path, digest: str) -> None:
        self.out, self.folder = out, out.with_name(out.name + PARTIAL)
        self._digest = digest
        self.done: dict[int, Done] = {}

    @contextmanager
    def open(self, files: Sequence[OutputFile], units: Sequence[Unit]) -> Iterator["Staging"]:
        """Hold the folder; afterwards `done` has the units that an earlier run finished, checked anew."""
        refuse_existing(self.out)
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / JOURNAL).open("a+b") as self._journal:
            self._lock()
            self._resume(files, units)
            yield self

    def finish(self, unit: Unit, done: Done) -> None:
        self.done[unit.number] = done
        self._journal.write(json.dumps([unit.number, _to_json(done)]).encode() + b"\n")
        self._journal.flush()

    def file_sums(self, files: Sequence[OutputFile], units: Sequence[Unit]) -> dict[str, FileSums]:
        """Checksums of the written files, from those taken while writing."""
        spans = {file.name: [header] if (header := _header_span(file)) else [] for file in files}
        for unit in units:
            spans[unit.file] += self.done[unit.number].written
        return {
            file.name: FileSums(
                file.num_bytes, tuple(sorted(spans[file.name], key=lambda span: span.start))
            )
            for file in files
        }

    def commit(self) -> None:
        (self.folder / JOURNAL).unlink()
        self.folder.rename(self.out)

    def _lock(self) -> None:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ValueError(
                        f"{self.folder} is being written by another process (waited {LOCK_WAIT_S:.0f} s): "
                        "wait for it, or choose another output"
                    ) from None
                time.sleep(0.1)

    def _resume(self, files: Sequence[OutputFile], units: Sequence[Unit]) -> None:
        self._journal.seek(0)
        first, *lines = self._journal.read().split(b"\n")
        if first.decode(errors="replace") == self._digest:
            self.done = _still_there(self.folder, lines, units)
        else:
            for path in self.folder.iterdir():
                if path.name != JOURNAL:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        # What was torn by a kill goes.
        self._journal.truncate(0)
        self._journal.write(self._digest.encode() + b"\n")
        for number, done in self.done.items():
            self._journal.write(json.dumps([number, _to_json(done)]).encode() + b"\n")
        self._journal.flush()
        for file in files:
            with (self.folder / file.name).open("ab") as out:
                os.truncate(out.fileno(), file.num_bytes)
            with (self.folder / file.name).open("r+b") as out:
                out.write(file.header)


def refuse_existing(out: Path) -> None:
    if out.exists():
        raise ValueError(f"{out} exists: choose another output, or remove it first")


def _still_there(folder: Path, lines: Sequence[bytes], units: Sequence[Unit]) -> dict[int, Done]:
    """Units of the journal whose bytes have the checksums that it says."""
    by_number = {unit.number: unit for unit in units}
    kept: dict[int, Done] = {}
    for line in lines:
        try:
            number, value = json.loads(line)
            done = _from_json(value)
            path = folder / by_number[number].file
            if sum_ranges(path, [(span.start, span.stop) for span in done.written]) == list(
                done.written
            ):
                kept[number] = done
        except (ValueError, KeyError, TypeError, OSError):
            continue
    return kept


def _header_span(file: OutputFile) -> Span | None:
    return Span(0, len(file.header), zlib_ng.crc32(file.header)) if file.header else None


def _to_json(done: Done) -> list[object]:
    def spans(members: Sequence[Span]) -> list[list[int]]:
        return [[span.start, span.num_bytes, span.crc32] for span in members]

    record = done.record
    return [
        spans(done.written),
        {path: spans(members) for path, members in record.read.items()},
        {path: spans(members) for path, members in record.promised.items()},
    ]


def _from_json(value: list) -> Done:
    def spans(members: Sequence[Sequence[int]]) -> list[Span]:
        return [Span(*member) for member in members]

    written, read, promised = value
    record = Record()
    record.read.update({path: spans(members) for path, members in read.items()})
    record.promised.update({path: spans(members) for path, members in promised.items()})
    return Done(tuple(spans(written)), record)
