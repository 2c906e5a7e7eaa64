"""Writes assemblies to their places in files and returns the checksums of what it wrote.

Peak memory of a worker: one band and the reader's scratch memory. Quantizing takes four more
bands, also to INT4, dequantizing what unpack.py says.
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
from checkpoint_tools.reader import Reader, ReadRecord, bands
from checkpoint_tools.stored import DTYPE_BYTES, Chunk
from mcore_rl.process.disk import report_full_disk
from mcore_rl.weights.hf.checksums import ByteSpan
from mcore_rl.weights.hf.fp8 import BLOCK

Made = Assembly | Packed
"""How a tensor that is to be written is made."""
LARGEST_BAND = 1 << 20
"""Bytes. A band of this size stays in a core's own cache between reading and writing."""

FILES_AT_ONCE = 8
SMALLEST_SHARE = 128 << 20
"""Bytes. A smaller model is not worth several files."""


@dataclass(frozen=True)
class Task:
    """Write one tensor to a file from byte `start` on.

    is_archive     inside an archive of torch.save
    scales_start   byte where the blocks' scales go if the matrix is to be quantized
    before         the matrix in INT4 as it was; it is then quantized to INT4, its words go to
                   `start`, and groups that did not change are kept
    """

    file: str
    start: int
    assembly: Made
    is_archive: bool = False
    scales_start: int | None = None
    before: Chunk | None = None

    @property
    def source_bytes(self) -> int:
        return self.assembly.num_bytes


@dataclass(frozen=True)
class OutputFile:
    """A file of `num_bytes` that begins with `header`; its tasks write all other bytes."""

    name: str
    num_bytes: int
    header: bytes
    tasks: tuple[Task, ...]


@dataclass(frozen=True)
class Unit:
    """Tasks of one file that a worker carries out in one go; what a kill loses at most."""

    number: int
    file: str
    tasks: tuple[Task, ...]

    @property
    def source_bytes(self) -> int:
        return sum(task.source_bytes for task in self.tasks)


@dataclass(frozen=True)
class Done:
    """The spans that a unit wrote, and the record of what was read for it."""

    written: tuple[ByteSpan, ...]
    record: ReadRecord


def compute_share(total_bytes: int, max_file_bytes: int) -> int:
    """Return the bytes to put in each file of an output of `total_bytes`.

    The system lets one process at a time write to a file, so even an output that would fit in one
    file is cut into some, for workers to write at once.
    """
    return min(max_file_bytes, max(SMALLEST_SHARE, -(-total_bytes // FILES_AT_ONCE)))


def make_units(files: Sequence[OutputFile], unit_bytes: int) -> list[Unit]:
    """Cut the tasks of each file, in their order, into units of about `unit_bytes`."""
    units: list[Unit] = []
    for file in files:
        batch: list[Task] = []
        batch_bytes = 0
        for task in file.tasks:
            task_bytes = task.source_bytes
            if batch and batch_bytes + task_bytes > unit_bytes:
                units.append(Unit(len(units), file.name, tuple(batch)))
                batch = []
                batch_bytes = 0
            batch.append(task)
            batch_bytes += task_bytes
        if batch:
            units.append(Unit(len(units), file.name, tuple(batch)))
    return units


class Writer:
    """Carries out units of one output folder, in one process."""

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        """memory_bytes   for the buffers of this process"""
        self._folder = folder
        self._band_bytes = buffer_bytes(memory_bytes)
        self._reader = Reader(self._band_bytes)
        self._band = bytearray(self._band_bytes)

    def __call__(self, unit: Unit) -> Done:
        path = self._folder / unit.file
        written: list[ByteSpan] = []
        with report_full_disk(path), path.open("r+b", buffering=0) as file:
            for task in unit.tasks:
                written += self._write(file.fileno(), task)
        return Done(tuple(written), self._reader.take_record())

    def _write(self, descriptor: int, task: Task) -> list[ByteSpan]:
        made = task.assembly
        if isinstance(made, Packed):
            return self._write_unpacked(descriptor, made, task.start)
        for stretch in made.skipped:
            self._reader.skip(stretch)
        if task.before is not None:
            return self._write_int4(descriptor, made, task, task.before)
        if task.scales_start is not None:
            return self._write_quantized(descriptor, made, task.start, task.scales_start)
        if task.is_archive:
            return [self._write_archive(descriptor, made, task)]
        span = self._write_elements(descriptor, made, task.start)
        return [] if span is None else [span]

    def _write_archive(self, descriptor: int, made: Assembly, task: Task) -> ByteSpan:
        """Write a tensor inside an archive; the span is that of the whole archive."""
        archive = make_archive(made.dtype, made.shape)
        _write_all(descriptor, archive.prefix, task.start)
        first = task.start + len(archive.prefix)
        crc32 = zlib_ng.crc32(archive.prefix)
        data = self._write_elements(descriptor, made, first)
        if data is not None:
            crc32 = zlib_ng.crc32_combine(crc32, data.crc32, data.num_bytes)
        suffix = archive.suffix(data.crc32 if data is not None else 0)
        _write_all(descriptor, suffix, first + archive.data_bytes)
        return ByteSpan(task.start, archive.num_bytes, zlib_ng.crc32(suffix, crc32))

    def _write_elements(self, descriptor: int, assembly: Assembly, start: int) -> ByteSpan | None:
        """Write a tensor's elements; returns None if it has none."""
        size = DTYPE_BYTES[assembly.dtype]
        crc32 = 0
        for band in bands(assembly, self._band_bytes):
            view = self._view((band.stop - band.start) * size)
            band_crc32 = self._reader.fill(assembly, band, view)
            if band_crc32 is None:
                band_crc32 = zlib_ng.crc32(view)
            crc32 = zlib_ng.crc32_combine(crc32, band_crc32, len(view))
            _write_all(descriptor, view, start + band.start * size)
        return ByteSpan(start, assembly.num_bytes, crc32) if assembly.num_bytes else None

    def _write_unpacked(self, descriptor: int, packed: Packed, start: int) -> list[ByteSpan]:
        from checkpoint_tools.unpack import unpack_tensor  # imports torch

        at = start
        crc32 = 0
        for view in unpack_tensor(packed, self._reader, self._band_bytes):
            crc32 = zlib_ng.crc32(view, crc32)
            _write_all(descriptor, view, at)
            at += len(view)
        assert at == start + packed.num_bytes, (
            f"{packed.name}: {at - start} bytes of {packed.num_bytes}"
        )
        return [ByteSpan(start, packed.num_bytes, crc32)] if packed.num_bytes else []

    def _write_quantized(
        self, descriptor: int, assembly: Assembly, start: int, scales_start: int
    ) -> list[ByteSpan]:
        """Write values and scales band by band, each of whole blocks; see weights/hf/fp8.py."""
        from checkpoint_tools.cast import quantize  # imports torch

        size = DTYPE_BYTES[assembly.dtype]
        columns = assembly.shape[1]
        values_crc32 = 0
        scales_crc32 = 0
        scales_at = scales_start
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
            ByteSpan(start, prod(assembly.shape), values_crc32),
            ByteSpan(scales_start, scales_at - scales_start, scales_crc32),
        ]
        return [span for span in spans if span.num_bytes]

    def _write_int4(
        self, descriptor: int, assembly: Assembly, task: Task, before: Chunk
    ) -> list[ByteSpan]:
        """Write words and scales band by band, each of whole rows; see weights/hf/int4.py."""
        from checkpoint_tools.cast import quantize_int4  # imports torch

        assert before.scales is not None and task.scales_start is not None, task.file
        spans: list[list[int]] = [[task.start, 0, 0], [task.scales_start, 0, 0]]
        for band in bands(assembly, self._band_bytes // 8):
            view = self._view((band.stop - band.start) * DTYPE_BYTES[assembly.dtype])
            self._reader.fill(assembly, band, view)
            parts = self._reader.read_int4(before, band.start, band.stop - band.start)
            for span, made in zip(spans, quantize_int4(view, assembly.dtype, *parts), strict=True):
                _write_all(descriptor, made, span[0] + span[1])
                span[1:] = span[1] + len(made), zlib_ng.crc32(made, span[2])
        return [ByteSpan(*span) for span in spans if span[1]]

    def _view(self, num_bytes: int) -> memoryview:
        """Return `num_bytes` of the band's buffer, which grows for a row longer than a band."""
        if num_bytes > len(self._band):
            self._band = bytearray(num_bytes)
        return memoryview(self._band)[:num_bytes]


def check_held(made: Iterable[Made], worker_bytes: int) -> None:
    """Check that a third of a worker's memory is enough for what it holds of any tensor.

    The rest is for bands. Raises ValueError with the tensor and the options to change.
    """
    largest = max(made, key=lambda made: made.held_bytes, default=None)
    if largest is not None and 3 * largest.held_bytes > worker_bytes:
        raise ValueError(
            f"--memory-budget leaves {worker_bytes >> 10} KiB for each worker, {largest.name!r}"
            f" needs {3 * largest.held_bytes >> 10} KiB: raise it, or take fewer --workers"
        )


def buffer_bytes(memory_bytes: int) -> int:
    """Return the size of a worker's band, and of its scratch memory.

    Raises ValueError if `memory_bytes`, for all buffers of a worker, is too little.
    """
    if memory_bytes < 4 << 20:
        raise ValueError(
            f"--memory-budget leaves {memory_bytes >> 10} KiB for each worker, which needs 4 MiB: "
            "raise it, or take fewer --workers"
        )
    return min(LARGEST_BAND, memory_bytes // 8) // 64 * 64


def _write_all(descriptor: int, data: bytes | memoryview, start: int) -> None:
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], start + done)
