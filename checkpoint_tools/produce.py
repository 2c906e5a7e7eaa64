"""Writes planned files to a folder, which gets its name only once all checksums agree."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import attrgetter
from pathlib import Path

from checkpoint_tools.ledger import Ledger
from checkpoint_tools.options import Effort, show_bytes, work_through
from checkpoint_tools.output import (
    Done,
    OutputFile,
    Task,
    Unit,
    Writer,
    buffer_bytes,
    check_held,
    make_units,
)
from checkpoint_tools.staging import JOURNAL, StagedOutput
from checkpoint_tools.stored import DTYPE_BYTES, Checkpoint
from mcore_rl.process.disk import report_full_disk
from mcore_rl.weights.hf.checksums import sum_small_files, write_manifest
from mcore_rl.weights.models.table import Shape

SMALLEST_UNIT, LARGEST_UNIT = 1 << 20, 64 << 20
"""Bounds, in bytes, of what a worker does in one go: large units lose more work to a kill."""
_FORMAT = 1


@dataclass(frozen=True)
class ConversionReport:
    """The output of a command, and the time and memory it took.

    reused_bytes   part of the output that an earlier, killed run had finished
    checked        number of the source's checksums that agreed
    peak_bytes     peak memory of all processes together, see PeakMemory
    """

    out: Path
    num_tensors: int
    num_bytes: int
    seconds: float
    reused_bytes: int
    checked: int
    peak_bytes: int

    def __str__(self) -> str:
        speed = show_bytes((self.num_bytes - self.reused_bytes) / max(self.seconds, 1e-9))
        reused = (
            f", {show_bytes(self.reused_bytes)} kept from an earlier run"
            if self.reused_bytes
            else ""
        )
        return (
            f"{self.out}: {self.num_tensors} tensors, {show_bytes(self.num_bytes)} in "
            f"{self.seconds:.1f} s ({speed}/s{reused}); {self.checked} checksums of the source "
            f"agreed; peak memory {show_bytes(self.peak_bytes)} (Pss of all processes)"
        )


def produce(
    out: Path,
    sources: Sequence[Checkpoint],
    files: Sequence[OutputFile],
    effort: Effort,
    describe: Callable[[Path], None],
    reopen: Callable[[Path], Checkpoint],
    expected: Mapping[str, tuple[str, Shape]],
) -> ConversionReport:
    """Write `files` to `out`, which gets its name only after every check.

    describe   writes the small files of the folder (index, configuration, metadata)
    reopen     opens the folder as a reader would, with every check
    expected   tensor -> (dtype, shape) of exactly the tensors that the folder must then have
    Raises ValueError with the file or tensor that is wrong, DiskFullError with the file that did
    not fit. A rerun continues where this run stopped.
    """
    begun = time.monotonic()
    buffer_bytes(effort.worker_bytes)
    check_held((task.assembly for file in files for task in file.tasks), effort.worker_bytes)
    total = sum(file.num_bytes for file in files)
    units = make_units(files, min(LARGEST_UNIT, max(SMALLEST_UNIT, total // 64)))
    staging = StagedOutput(out, _digest(sources, files, units))
    with report_full_disk(staging.folder), staging.open(files, units):
        ledger = Ledger(sources)
        for done in staging.done.values():
            ledger.add(done.record)
        reused = sum(span.num_bytes for done in staging.done.values() for span in done.written)

        def finish(unit: Unit, done: Done) -> None:
            ledger.add(done.record)
            staging.finish(unit, done)

        remaining = [unit for unit in units if unit.number not in staging.done]
        make = partial(Writer, staging.folder, effort.worker_bytes)
        peak = _carry_out(make, remaining, effort, out.name, finish)
        ledger.close()
        describe(staging.folder)
        sums = staging.file_sums(files, units)
        sums |= sum_small_files(staging.folder, {*sums, JOURNAL})
        write_manifest(staging.folder, sums)
        _check(reopen(staging.folder), expected)
        staging.commit()
    seconds = time.monotonic() - begun
    return ConversionReport(out, len(expected), total, seconds, reused, ledger.num_checked, peak)


def _carry_out(
    make: Callable[[], Callable[[Unit], Done]],
    units: Sequence[Unit],
    effort: Effort,
    text: str,
    finish: Callable[[Unit, Done], None],
) -> int:
    """Have workers write `units`, each worker a file of its own while there are enough."""
    size_of, lane_of = attrgetter("source_bytes"), attrgetter("file")
    return work_through(make, units, size_of, effort, text, finish, lane_of)


def _check(made: Checkpoint, expected: Mapping[str, tuple[str, Shape]]) -> None:
    """Raise ValueError unless a folder has exactly the tensors that were expected of it."""
    actual = {tensor.key: (tensor.dtype, tensor.shape) for tensor in made.tensors.values()}
    for name in sorted(actual.keys() | expected.keys()):
        if actual.get(name) != expected.get(name):
            raise ValueError(
                f"{made.folder}: tensor {name!r} is {actual.get(name)}, should be"
                f" {expected.get(name)}"
            )
    expected_bytes = sum(prod(shape) * DTYPE_BYTES[dtype] for dtype, shape in expected.values())
    if made.num_bytes != expected_bytes:
        raise ValueError(
            f"{made.folder} has {made.num_bytes} bytes of tensors, it should have {expected_bytes}"
        )


def _digest(
    sources: Sequence[Checkpoint], files: Sequence[OutputFile], units: Sequence[Unit]
) -> str:
    """Return a digest of the sources as they are on disk, and of what each unit makes of them."""
    paths: set[str] = set()
    for source in sources:
        for tensor in source.tensors.values():
            paths.update(chunk.path for chunk in tensor.chunks)
    stats: list[tuple[str, int, int]] = []
    for path in sorted(paths):
        stat = Path(path).stat()
        stats.append((path, stat.st_size, stat.st_mtime_ns))
    plan = [(file.name, file.num_bytes, file.header.hex()) for file in files]
    tasks = [(unit.number, unit.file, [_encode(task) for task in unit.tasks]) for unit in units]
    return hashlib.sha256(json.dumps([_FORMAT, stats, plan, tasks]).encode()).hexdigest()


def _encode(task: Task) -> list[object]:
    made = task.assembly
    place = [task.start, task.is_archive, task.scales_start]
    if task.before is not None:
        place += [task.before.path, task.before.start]
    return [*place, made.name, made.dtype, made.shape, made.places()]
