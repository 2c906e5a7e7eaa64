"""Assemblies read band by band: each byte of the files once, its checksum taken on the way.

Peak memory: what the caller passes for a band, as much again for pieces that are scattered or cast, and a
transposed piece as it is stored.
"""

import os
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.lib.stride_tricks import as_strided
from zlib_ng import zlib_ng

from checkpoint_tools.archive import Located, Locator
from checkpoint_tools.assembly import Assembly, Piece, Stretch, cut
from checkpoint_tools.stored import DTYPE_BYTES, Chunk
from mcore_rl.slices.hf.checksums import Span


@dataclass
class Record:
    """What was read: checksums by file, and those that archives say their data should have."""

    read: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))
    promised: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))


@dataclass(frozen=True)
class Band:
    """Elements [start, stop) of a tensor, and the pieces that have some of them."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]


def bands(assembly: Assembly, band_bytes: int, row: int | None = None) -> list[Band]:
    """The tensor in whole rows of `row` elements, at least one row each."""
    row, size = row or assembly.row, DTYPE_BYTES[assembly.dtype]
    numel = assembly.num_bytes // size
    step = max(1, band_bytes // (row * size)) * row if numel else 1
    members: dict[int, list[Piece]] = defaultdict(list)
    for piece in assembly.pieces:
        last = piece.target + (piece.rows - 1) * piece.stride + piece.run - 1
        for number in range(piece.target // step, last // step + 1):
            members[number].append(piece)
    return [
        Band(start, min(start + step, numel), tuple(members[start // step]))
        for start in range(0, numel, step)
    ]


class Reader:
    """Open files and located chunks; of one process. Close it when done."""

    def __init__(self, scratch_bytes: int) -> None:
        self._scratch = bytearray(scratch_bytes)
        self._descriptors: dict[str, int] = {}
        self._locator = Locator()
        self._located: dict[tuple[str, int], Located] = {}
        self._held: tuple[Piece | None, bytearray] = (None, bytearray())
        self.record = Record()

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def take_record(self) -> Record:
        """What was read since the last call."""
        record, self.record = self.record, Record()
        self._located.clear()
        return record

    def fill(self, assembly: Assembly, band: Band, out: memoryview) -> int | None:
        """Write the band's elements to `out`, bytes of just its size; its CRC-32 if reading gave it."""
        size = DTYPE_BYTES[assembly.dtype]
        parts = [
            (piece, part) for piece in band.pieces if (part := cut(piece, band.start, band.stop))
        ]
        if sum(rows * run for _, (_, rows, run, _) in parts) != band.stop - band.start:
            out[:] = bytes(len(out))
        crc32 = None
        for piece, (source, rows, run, target) in parts:
            first = (target - band.start) * size
            if piece.transposed:
                self._turn(piece, source - piece.source, rows, out[first:], assembly.dtype)
            elif rows == 1 and piece.chunk.dtype == assembly.dtype:
                crc32 = self._read(piece.chunk, source * size, out[first : first + run * size])
            else:
                self._scatter(piece, (source, rows, run), out[first:], assembly.dtype)
                crc32 = None
        is_whole = len(parts) == 1 and parts[0][1][2] == band.stop - band.start
        return crc32 if is_whole else None

    def skip(self, stretch: Stretch) -> None:
        """Read what goes nowhere."""
        size = DTYPE_BYTES[stretch.chunk.dtype]
        start, stop = stretch.source * size, (stretch.source + stretch.count) * size
        for at in range(start, stop, len(self._scratch)):
            self._read(
                stretch.chunk, at, memoryview(self._scratch)[: min(len(self._scratch), stop - at)]
            )

    def _scatter(
        self, piece: Piece, part: tuple[int, int, int], out: memoryview, dtype: str
    ) -> None:
        """As many rows at a time as the scratch memory holds; a longer row in several steps."""
        source, rows, run = part
        stored, size, target_size = (
            piece.chunk.dtype,
            DTYPE_BYTES[piece.chunk.dtype],
            DTYPE_BYTES[dtype],
        )
        target = np.frombuffer(out, dtype=f"u{target_size}")
        width = min(run, max(1, len(self._scratch) // size))
        height = max(1, len(self._scratch) // (size * width)) if width == run else 1
        for row in range(0, rows, height):
            count = min(height, rows - row)
            for column in range(0, run, width):
                columns = min(width, run - column)
                view = memoryview(self._scratch)[: count * columns * size]
                self._read(piece.chunk, (source + row * run + column) * size, view)
                values = np.frombuffer(_cast(view, stored, dtype), dtype=target.dtype)
                places = target[row * piece.stride + column :]
                strides = (piece.stride * target_size, target_size)
                as_strided(places, (count, columns), strides)[:] = values.reshape(count, columns)

    def _turn(self, piece: Piece, first_row: int, rows: int, out: memoryview, dtype: str) -> None:
        """Columns of the stored matrix to rows of the tensor. It is read once, whole, for all bands."""
        stored, target_size = piece.chunk.dtype, DTYPE_BYTES[dtype]
        if self._held[0] is not piece:
            self._held = (None, bytearray())  # frees the last one
            data = bytearray(piece.num_bytes)
            view, start = memoryview(data), piece.source * DTYPE_BYTES[stored]
            step = max(1, len(self._scratch))
            for at in range(0, len(data), step):
                self._read(piece.chunk, start + at, view[at : at + step])
            self._held = (piece, data)
        stored_matrix = np.frombuffer(self._held[1], dtype=f"u{DTYPE_BYTES[stored]}")
        matrix = stored_matrix.reshape(piece.run, piece.rows)
        columns = np.ascontiguousarray(matrix[:, first_row : first_row + rows].T)
        data = columns.reshape(-1).view(np.uint8).data
        values = np.frombuffer(_cast(data, stored, dtype), dtype=f"u{target_size}")
        places = np.frombuffer(out, dtype=values.dtype)
        strides = (piece.stride * target_size, target_size)
        as_strided(places, (rows, piece.run), strides)[:] = values.reshape(rows, piece.run)

    def _read(self, chunk: Chunk, offset: int, out: memoryview) -> int:
        """Bytes of the chunk's elements from `offset` on; their CRC-32."""
        descriptor = self._open(chunk)
        first = self._locate(descriptor, chunk).start
        start, done = first + offset, 0
        while done < len(out):
            count = os.preadv(descriptor, [out[done:]], start + done)
            if count == 0:
                raise ValueError(
                    f"{chunk.where}: the file ends at byte {start + done}: it was truncated"
                )
            done += count
        crc32 = zlib_ng.crc32(out)
        _append(self.record.read[chunk.path], Span(start, len(out), crc32), first)
        return crc32

    def _open(self, chunk: Chunk) -> int:
        if chunk.path not in self._descriptors:
            self._descriptors[chunk.path] = os.open(chunk.path, os.O_RDONLY)
        return self._descriptors[chunk.path]

    def _locate(self, descriptor: int, chunk: Chunk) -> Located:
        place = (chunk.path, chunk.start)
        if place not in self._located:
            located = self._located[place] = self._locator.locate(descriptor, chunk)
            self.record.read[chunk.path] += [span for span in located.around if span.num_bytes]
            if located.data_crc32 is not None and chunk.data_bytes:
                promised = Span(located.start, chunk.data_bytes, located.data_crc32)
                self.record.promised[chunk.path].append(promised)
        return self._located[place]


def _append(spans: list[Span], new: Span, first: int) -> None:
    """Lengthen a span that `new` follows, else begin one. Of the last three, since the rows of queries, keys
    and values are read in turn; none that began before `first`, where another tensor lies.
    """
    for i in range(len(spans) - 1, max(-1, len(spans) - 4), -1):
        if spans[i].stop == new.start and spans[i].start >= first:
            crc32 = zlib_ng.crc32_combine(spans[i].crc32, new.crc32, new.num_bytes)
            spans[i] = Span(spans[i].start, spans[i].num_bytes + new.num_bytes, crc32)
            return
    spans.append(new)


def _cast(data: memoryview, dtype: str, to: str) -> memoryview:
    if dtype == to:
        return data
    from checkpoint_tools.cast import cast  # imports torch

    return cast(data, dtype, to)
