"""Files to be: which assemblies go where in which file, and what a worker does to write them.

Peak memory of a worker: one band and the reader's scratch memory (to quantize four bands more, to dequantize
what unpack.py says).
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from zlib_ng import zlib_ng

from checkpoint_tools.archive_writer import make_archive
from checkpoint_tools.assembly import Assembly
from checkpoint_tools.packed import Packed
from checkpoint_tools.reader import Reader, Record, bands
from checkpoint_tools.stored import DTYPE_BYTES
from mcore_rl.process.disk import reporting_full_disk
from mcore_rl.slices.hf.checksums import Span
from mcore_rl.slices.hf.fp8 import BLOCK

Made = Assembly | Packed


@dataclass(frozen=True)
class Task:
    """Write a tensor to bytes from `start` on of `file`, as it is or inside an archive of torch.save.

    scales_start   where the scales of the blocks go, if the matrix is to be written as 8-bit values
    """

    file: str
    start: int
    assembly: Made
    is_archive: bool = False
    scales_start: int | None = None

    @property
    def source_bytes(self) -> int:
        return self.assembly.num_bytes


@dataclass(frozen=True)
class OutputFile:
    """A file of `num_bytes` that begins with `header`; its tasks write the rest."""

    name: str
    num_bytes: int
    header: bytes
    tasks: tuple[Task, ...]


@dataclass(frozen=True)
class Unit:
    """Tasks of one file that one worker carries out at a time."""

    number: int
    file: str
    tasks: tuple[Task, ...]

    @property
    def source_bytes(self) -> int:
        return sum(task.source_bytes for task in self.tasks)


@dataclass(frozen=True)
class Done:
    """What a unit wrote, stretch by stretch, and what was read for it."""

    written: tuple[Span, ...]
    record: Record


def make_units(files: Sequence[OutputFile], unit_bytes: int) -> list[Unit]:
    """Cut the tasks of each file, in their order, into units of about `unit_bytes`."""
    units: list[Unit] = []
    for file in files:
        batch: list[Task] = []
        for task in file.tasks:
            if batch and sum(t.source_bytes for t in batch) + task.source_bytes > unit_bytes:
                units.append(Unit(len(units), file.name, tuple(batch)))
                batch = []
            batch.append(task)
        if batch:
            units.append(Unit(len(units), file.name, tuple(batch)))
    return units


class Writer:
    """Carries out units of one output folder, in one process."""

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        """`memory_bytes`: for this process's buffers."""
        self._folder = folder
        self._band_bytes = buffer_bytes(memory_bytes)
        self._reader = Reader(self._band_bytes)
        self._band = bytearray(self._band_bytes)

    def __call__(self, unit: Unit) -> Done:
        path = self._folder / unit.file
        written: list[Span] = []
        with reporting_full_disk(path), path.open("r+b", buffering=0) as file:
            for task in unit.tasks:
                written += self._write(file.fileno(), task)
        return Done(tuple(written), self._reader.take_record())

    def _write(self, descriptor: int, task: Task) -> list[Span]:
        made = task.assembly
        if isinstance(made, Packed):
            return self._write_unpacked(descriptor, made, task.start)
        for stretch in made.skipped:
            self._reader.skip(stretch)
        if task.scales_start is not None:
            return self._write_quantized(descriptor, made, task.start, task.scales_start)
        if not task.is_archive:
            return self._write_elements(descriptor, made, task.start)
        archive = make_archive(made.dtype, made.shape)
        _write_all(descriptor, archive.prefix, task.start)
        first = task.start + len(archive.prefix)
        crc32 = zlib_ng.crc32(archive.prefix)
        data = self._write_elements(descriptor, made, first)
        suffix = archive.suffix(data[0].crc32 if data else 0)
        _write_all(descriptor, suffix, first + archive.data_bytes)
        for part_crc32, num_bytes in (
            *((s.crc32, s.num_bytes) for s in data),
            (zlib_ng.crc32(suffix), len(suffix)),
        ):
            crc32 = zlib_ng.crc32_combine(crc32, part_crc32, num_bytes)
        return [Span(task.start, archive.num_bytes, crc32)]

    def _write_elements(self, descriptor: int, assembly: Assembly, start: int) -> list[Span]:
        size, crc32 = DTYPE_BYTES[assembly.dtype], 0
        for band in bands(assembly, self._band_bytes):
            view = self._view((band.stop - band.start) * size)
            known = self._reader.fill(assembly, band, view)
            known = zlib_ng.crc32(view) if known is None else known
            crc32 = zlib_ng.crc32_combine(crc32, known, len(view))
            _write_all(descriptor, view, start + band.start * size)
        return [Span(start, assembly.num_bytes, crc32)] if assembly.num_bytes else []

    def _write_unpacked(self, descriptor: int, packed: Packed, start: int) -> list[Span]:
        from checkpoint_tools.unpack import unpacked  # imports torch

        at, crc32 = start, 0
        for view in unpacked(packed, self._reader, self._band_bytes):
            crc32 = zlib_ng.crc32(view, crc32)
            _write_all(descriptor, view, at)
            at += len(view)
        assert at == start + packed.num_bytes, (
            f"{packed.name}: {at - start} bytes of {packed.num_bytes}"
        )
        return [Span(start, packed.num_bytes, crc32)] if packed.num_bytes else []

    def _write_quantized(
        self, descriptor: int, assembly: Assembly, start: int, scales_start: int
    ) -> list[Span]:
        """Bands of whole rows of blocks; see mcore_rl/slices/hf/fp8.py."""
        size, columns = DTYPE_BYTES[assembly.dtype], assembly.shape[1]
        values_crc32, scales_crc32, scales_at = 0, 0, scales_start
        from checkpoint_tools.cast import quantize  # imports torch

        for band in bands(assembly, self._band_bytes // 4, row=BLOCK * columns):
            view = self._view((band.stop - band.start) * size)
            self._reader.fill(assembly, band, view)
            values, scales = quantize(view, assembly.dtype, columns)
            values_crc32 = zlib_ng.crc32(values, values_crc32)
            scales_crc32 = zlib_ng.crc32(scales, scales_crc32)
            _write_all(descriptor, values, start + band.start)
            _write_all(descriptor, scales, scales_at)
            scales_at += len(scales)
        spans = [
            Span(start, prod(assembly.shape), values_crc32),
            Span(scales_start, scales_at - scales_start, scales_crc32),
        ]
        return [span for span in spans if span.num_bytes]

    def _view(self, num_bytes: int) -> memoryview:
        """A single row may be longer than a band."""
        if num_bytes > len(self._band):
            self._band = bytearray(num_bytes)
        return memoryview(self._band)[:num_bytes]


def check_held(made: Iterable[Made], worker_bytes: int) -> None:
    """ValueError unless a third of a worker's buffers is enough for what it holds of any tensor; the rest is
    for bands.
    """
    largest = max(made, key=lambda made: made.held_bytes, default=None)
    if largest is not None and 3 * largest.held_bytes > worker_bytes:
        raise ValueError(
            f"--memory-budget leaves {worker_bytes >> 10} KiB for each worker, {largest.name!r} needs"
            f" {3 * largest.held_bytes >> 10} KiB: raise it, or take fewer --workers"
        )


LARGEST_BAND = 8 << 20
"""More gains nothing; bands of this size stay in the processor's cache between reading and writing."""


def buffer_bytes(memory_bytes: int) -> int:
    """Of the band and of the scratch memory; ValueError if the budget leaves too little to work with."""
    if memory_bytes < 4 << 20:
        raise ValueError(
            f"--memory-budget leaves {memory_bytes >> 10} KiB for each worker, which needs 4 MiB: raise it, "
            "or take fewer --workers"
        )
    return min(LARGEST_BAND, memory_bytes // 8) // 64 * 64


def _write_all(descriptor: int, data: bytes | memoryview, start: int) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], start + done)
