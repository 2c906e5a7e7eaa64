"""Collects finished units of work in a folder, so that a rerun continues what a kill stopped.

<out>.partial/            files of full size, filled unit by unit, in any order
<out>.partial/.journal    first line: a digest of what is to be made; then a line per finished unit
<out>                     the same folder, renamed when everything was checked
"""

import fcntl
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from zlib_ng import zlib_ng

from checkpoint_tools.output import Done, OutputFile, Unit
from checkpoint_tools.reader import ReadRecord
from mcore_rl.process.disk import rename_whole, report_full_disk, reserve_space
from mcore_rl.weights.hf.checksums import ByteSpan, FileSums, sum_ranges

PARTIAL = ".partial"
JOURNAL = ".journal"
LOCK_WAIT_S = 10.0


class StagedOutput:
    """One run's exclusive hold on `<out>.partial`."""

    def __init__(self, out: Path, digest: str) -> None:
        """digest   identifies what is to be made; a folder with another digest is emptied"""
        self.out = out
        self.folder = out.with_name(out.name + PARTIAL)
        self._digest = digest
        self.done: dict[int, Done] = {}

    @contextmanager
    def open(self, files: Sequence[OutputFile], units: Sequence[Unit]) -> Iterator["StagedOutput"]:
        """Hold the folder within the block, with `done` set to what an earlier run finished.

        Those units are compared with their checksums. Raises ValueError if `out` exists, or if
        another process holds the folder.
        """
        refuse_existing(self.out)
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / JOURNAL).open("a+b") as self._journal:
            self._lock()
            self._resume(files, units)
            yield self

    def finish(self, unit: Unit, done: Done) -> None:
        """Enter a finished unit in the journal."""
        self.done[unit.number] = done
        self._journal.write(json.dumps([unit.number, _to_json(done)]).encode() + b"\n")
        self._journal.flush()

    def file_sums(self, files: Sequence[OutputFile], units: Sequence[Unit]) -> dict[str, FileSums]:
        """Return the checksums of all files, combined from those taken while writing."""
        spans: dict[str, list[ByteSpan]] = {}
        for file in files:
            spans[file.name] = []
            if file.header:
                header = ByteSpan(0, len(file.header), zlib_ng.crc32(file.header))
                spans[file.name].append(header)
        for unit in units:
            spans[unit.file] += self.done[unit.number].written
        sums: dict[str, FileSums] = {}
        for file in files:
            spans[file.name].sort(key=lambda span: span.start)
            sums[file.name] = FileSums(file.num_bytes, tuple(spans[file.name]))
        return sums

    def commit(self) -> None:
        """Give the folder its final name, with all of it on the disk."""
        (self.folder / JOURNAL).unlink()
        rename_whole(self.folder, self.out)

    def _lock(self) -> None:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ValueError(
                        f"{self.folder} is being written by another process (waited"
                        f" {LOCK_WAIT_S:.0f} s): wait for it, or choose another output"
                    ) from None
                time.sleep(0.1)

    def _resume(self, files: Sequence[OutputFile], units: Sequence[Unit]) -> None:
        self._journal.seek(0)
        first, *lines = self._journal.read().split(b"\n")
        if first.decode(errors="replace") == self._digest:
            self.done = _list_intact(self.folder, lines, units)
        else:
            for path in self.folder.iterdir():
                if path.name != JOURNAL:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        # The journal is rewritten without lines that a kill cut short.
        self._journal.truncate(0)
        self._journal.write(self._digest.encode() + b"\n")
        for number, done in self.done.items():
            self._journal.write(json.dumps([number, _to_json(done)]).encode() + b"\n")
        self._journal.flush()
        for file in files:
            path = self.folder / file.name
            path.touch()
            with report_full_disk(path), path.open("r+b") as out:
                reserve_space(out.fileno(), file.num_bytes)
                out.write(file.header)


def refuse_existing(out: Path) -> None:
    """Raise ValueError if `out` exists."""
    if out.exists():
        raise ValueError(f"{out} exists: choose another output, or remove it first")


def _list_intact(folder: Path, lines: Sequence[bytes], units: Sequence[Unit]) -> dict[int, Done]:
    """Return the units of a journal, by number, whose bytes still have its checksums."""
    by_number = {unit.number: unit for unit in units}
    intact: dict[int, Done] = {}
    for line in lines:
        try:
            number, value = json.loads(line)
            done = _from_json(value)
            path = folder / by_number[number].file
            ranges = [(span.start, span.stop) for span in done.written]
            if sum_ranges(path, ranges) == list(done.written):
                intact[number] = done
        except (ValueError, KeyError, TypeError, OSError):
            continue  # a damaged line or file: the unit is done again
    return intact


def _to_json(done: Done) -> list[object]:
    def spans(members: Sequence[ByteSpan]) -> list[list[int]]:
        return [[span.start, span.num_bytes, span.crc32] for span in members]

    record = done.record
    return [
        spans(done.written),
        {path: spans(members) for path, members in record.read.items()},
        {path: spans(members) for path, members in record.promised.items()},
    ]


def _from_json(value: list) -> Done:
    def spans(members: Sequence[Sequence[int]]) -> list[ByteSpan]:
        return [ByteSpan(*member) for member in members]

    written, read, promised = value
    record = ReadRecord()
    record.read.update({path: spans(members) for path, members in read.items()})
    record.promised.update({path: spans(members) for path, members in promised.items()})
    return Done(tuple(spans(written)), record)
