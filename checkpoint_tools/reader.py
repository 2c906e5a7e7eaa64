"""Reads the elements of assemblies band by band; each byte of a file is read and summed once.

Elements that are stored as INT4 words come out in the dtype of their scales.

Peak memory: the band that the caller passes, as much scratch memory for pieces that are scattered
or cast, and a transposed piece as stored. INT4 takes three bands more.
"""

import os
from collections import defaultdict
from dataclasses import dataclass, field, replace

from zlib_ng import zlib_ng

from checkpoint_tools.archive import Located, Locator
from checkpoint_tools.assembly import Assembly, Piece, Stretch, cut
from checkpoint_tools.stored import DTYPE_BYTES, Chunk
from mcore_rl.weights.hf.checksums import ByteSpan
from mcore_rl.weights.hf.int4 import GROUP, PACKED_DTYPE, PER_WORD

ROWS_BEFORE_NUMPY = 100_000
"""Rows that a reader lays out itself, in about the time that the import of numpy takes."""


@dataclass
class ReadRecord:
    """Checksums by path: `read` of the bytes read, `promised` as archives record them."""

    read: dict[str, list[ByteSpan]] = field(default_factory=lambda: defaultdict(list))
    promised: dict[str, list[ByteSpan]] = field(default_factory=lambda: defaultdict(list))


@dataclass(frozen=True)
class Band:
    """Elements [start, stop) of a tensor, and the pieces that hold some of them."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]


def bands(assembly: Assembly, band_bytes: int, row: int | None = None) -> list[Band]:
    """Cut a tensor into bands of whole rows of `row` elements, by default its own rows.

    Each is of at most `band_bytes`, but of one row at least.
    """
    row = row or assembly.row
    size = DTYPE_BYTES[assembly.dtype]
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
    """Reads the elements of assemblies, in one process, and records their checksums."""

    def __init__(self, scratch_bytes: int) -> None:
        self._scratch = bytearray(scratch_bytes)
        self._descriptors: dict[str, int] = {}
        self._locator = Locator()
        self._located: dict[tuple[str, int], Located] = {}
        self._held: tuple[Piece | None, bytearray] = (None, bytearray())
        self._num_rows = 0
        self.record = ReadRecord()

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def take_record(self) -> ReadRecord:
        """Return the record of what was read since the last call."""
        record = self.record
        self.record = ReadRecord()
        self._located.clear()
        return record

    def fill(self, assembly: Assembly, band: Band, out: memoryview) -> int | None:
        """Write a band's elements to `out`, which has exactly its size.

        Returns their CRC-32 if reading computed it, otherwise None.
        """
        size = DTYPE_BYTES[assembly.dtype]
        num_elements = band.stop - band.start
        num_covered = 0
        parts: list[tuple[Piece, tuple[int, int, int, int]]] = []
        for piece in band.pieces:
            part = cut(piece, band.start, band.stop)
            if part is not None:
                parts.append((piece, part))
                num_covered += part[1] * part[2]
        if num_covered != num_elements:
            out[:] = bytes(len(out))
        crc32 = None
        for piece, (source, rows, run, target) in parts:
            first = (target - band.start) * size
            if piece.transposed:
                first_row = source - piece.source
                self._transpose(piece, first_row, rows, out[first:], assembly.dtype)
            elif rows == 1 and piece.chunk.dtype == assembly.dtype:
                crc32 = self._read(piece.chunk, source * size, out[first : first + run * size])
            else:
                self._scatter(piece, (source, rows, run), out[first:], assembly.dtype)
                crc32 = None
        is_one_run = len(parts) == 1 and parts[0][1][2] == num_elements
        return crc32 if is_one_run else None

    def read_int4(self, chunk: Chunk, start: int, count: int) -> tuple[memoryview, memoryview, str]:
        """Return words, scales and the scales' dtype of elements of an INT4 chunk, whole groups."""
        assert chunk.scales is not None and start % GROUP == 0 == count % GROUP, f"{chunk.where}"
        word, size = DTYPE_BYTES[PACKED_DTYPE], DTYPE_BYTES[chunk.scales.dtype]
        words = memoryview(bytearray(count // PER_WORD * word))
        scales = memoryview(bytearray(count // GROUP * size))
        stored = replace(chunk, dtype=PACKED_DTYPE, scales=None)
        self._read(stored, start // PER_WORD * word, words)
        self._read(chunk.scales, start // GROUP * size, scales)
        return words, scales, chunk.scales.dtype

    def skip(self, stretch: Stretch) -> None:
        """Read elements that no tensor takes, for their checksum."""
        size = DTYPE_BYTES[stretch.chunk.dtype]
        start = stretch.source * size
        stop = start + stretch.count * size
        for at in range(start, stop, len(self._scratch)):
            count = min(len(self._scratch), stop - at)
            self._read(stretch.chunk, at, memoryview(self._scratch)[:count])

    def _scatter(
        self, piece: Piece, part: tuple[int, int, int], out: memoryview, dtype: str
    ) -> None:
        """Copy runs to rows that lie apart, or to another dtype.

        Takes as many rows at a time as the scratch memory holds, and a longer row in several steps.
        """
        source, rows, run = part
        stored = piece.chunk.dtype
        size = DTYPE_BYTES[stored]
        target_size = DTYPE_BYTES[dtype]
        width = min(run, max(1, len(self._scratch) // size))
        height = max(1, len(self._scratch) // (size * width)) if width == run else 1
        for row in range(0, rows, height):
            count = min(height, rows - row)
            for column in range(0, run, width):
                columns = min(width, run - column)
                view = memoryview(self._scratch)[: count * columns * size]
                self._read(piece.chunk, (source + row * run + column) * size, view)
                values = _cast(view, stored, dtype)
                first = (row * piece.stride + column) * target_size
                sizes = (count, columns * target_size, piece.stride * target_size)
                self._lay_out(values, out[first:], *sizes)

    def _lay_out(
        self, values: memoryview, out: memoryview, rows: int, row_bytes: int, step_bytes: int
    ) -> None:
        """Copy rows that lie end to end in `values` to places `step_bytes` apart in `out`."""
        self._num_rows += rows
        if self._num_rows <= ROWS_BEFORE_NUMPY:
            for row in range(rows):
                at = row * step_bytes
                out[at : at + row_bytes] = values[row * row_bytes : (row + 1) * row_bytes]
            return
        import numpy as np
        from numpy.lib.stride_tricks import as_strided

        places = as_strided(np.frombuffer(out, np.uint8), (rows, row_bytes), (step_bytes, 1))
        places[:] = np.frombuffer(values, np.uint8).reshape(rows, row_bytes)

    def _transpose(
        self, piece: Piece, first_row: int, rows: int, out: memoryview, dtype: str
    ) -> None:
        """Copy columns of a stored matrix to rows of the tensor.

        The matrix is read whole, once for all bands, and held until another one is needed.
        """
        import numpy as np

        stored = piece.chunk.dtype
        target_size = DTYPE_BYTES[dtype]
        if self._held[0] is not piece:
            self._held = (None, bytearray())  # frees the previous matrix
            data = bytearray(piece.num_bytes)
            view = memoryview(data)
            start = piece.source * DTYPE_BYTES[stored]
            step = max(1, len(self._scratch))
            for at in range(0, len(data), step):
                self._read(piece.chunk, start + at, view[at : at + step])
            self._held = (piece, data)
        stored_matrix = np.frombuffer(self._held[1], dtype=f"u{DTYPE_BYTES[stored]}")
        matrix = stored_matrix.reshape(piece.run, piece.rows)
        columns = np.ascontiguousarray(matrix[:, first_row : first_row + rows].T)
        data = columns.reshape(-1).view(np.uint8).data
        values = _cast(data, stored, dtype)
        sizes = (rows, piece.run * target_size, piece.stride * target_size)
        self._lay_out(values, out, *sizes)

    def _read(self, chunk: Chunk, offset: int, out: memoryview) -> int:
        """Fill `out` with a chunk's elements from byte `offset` on; return the CRC-32."""
        if chunk.scales is not None:
            return self._unpack_int4(chunk, offset, out)
        descriptor = self._open(chunk)
        first = self._locate(descriptor, chunk).start
        start = first + offset
        done = 0
        while done < len(out):
            count = os.preadv(descriptor, [out[done:]], start + done)
            if count == 0:
                raise ValueError(
                    f"{chunk.where}: the file ends at byte {start + done}: it was truncated"
                )
            done += count
        crc32 = zlib_ng.crc32(out)
        _append(self.record.read[chunk.path], ByteSpan(start, len(out), crc32), first)
        return crc32

    def _unpack_int4(self, chunk: Chunk, offset: int, out: memoryview) -> int:
        """Do the same for elements stored as INT4 words; `offset` counts bytes of elements."""
        from checkpoint_tools.cast import unpack_int4  # imports torch

        size = DTYPE_BYTES[chunk.dtype]
        words, scales, _ = self.read_int4(chunk, offset // size, len(out) // size)
        out[:] = unpack_int4(words, scales, chunk.dtype)
        return zlib_ng.crc32(out)

    def _open(self, chunk: Chunk) -> int:
        if chunk.path not in self._descriptors:
            self._descriptors[chunk.path] = os.open(chunk.path, os.O_RDONLY)
        return self._descriptors[chunk.path]

    def _locate(self, descriptor: int, chunk: Chunk) -> Located:
        place = (chunk.path, chunk.start)
        if place not in self._located:
            located = self._locator.locate(descriptor, chunk)
            self._located[place] = located
            self.record.read[chunk.path] += [span for span in located.around if span.num_bytes]
            if located.data_crc32 is not None and chunk.data_bytes:
                promised = ByteSpan(located.start, chunk.data_bytes, located.data_crc32)
                self.record.promised[chunk.path].append(promised)
        return self._located[place]


def _append(spans: list[ByteSpan], new: ByteSpan, first: int) -> None:
    """Append a span, or extend one of the last three if `new` follows it.

    Three, because query, key and value rows alternate. A span that began before `first` belongs to
    another tensor and is not extended.
    """
    for i in range(len(spans) - 1, max(-1, len(spans) - 4), -1):
        if spans[i].stop == new.start and spans[i].start >= first:
            crc32 = zlib_ng.crc32_combine(spans[i].crc32, new.crc32, new.num_bytes)
            spans[i] = ByteSpan(spans[i].start, spans[i].num_bytes + new.num_bytes, crc32)
            return
    spans.append(new)


def _cast(data: memoryview, dtype: str, to: str) -> memoryview:
    if dtype == to:
        return data
    from checkpoint_tools.cast import cast  # imports torch

    return cast(data, dtype, to)
