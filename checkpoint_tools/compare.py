"""Compares two tensors band by band and returns where and by how much they differ."""

from dataclasses import dataclass, field, replace

import torch
from zlib_ng import zlib_ng

from checkpoint_tools.assembly import Assembly
from checkpoint_tools.output import buffer_bytes
from checkpoint_tools.reader import Reader, ReadRecord, bands
from checkpoint_tools.stored import DTYPE_BYTES
from mcore_rl.weights.box import unravel


@dataclass(frozen=True)
class Pair:
    """The same tensor of two checkpoints, or of a single one, which is then only read."""

    name: str
    first: Assembly
    second: Assembly | None = None

    @property
    def num_bytes(self) -> int:
        return self.first.num_bytes + (self.second.num_bytes if self.second else 0)


@dataclass(frozen=True)
class Difference:
    """How two tensors differ.

    index           index of the first element that differs; `first` and `second` are its two values
    count, numel    number of elements that differ, and of all
    max_abs         largest absolute difference
    """

    index: tuple[int, ...]
    first: float
    second: float
    count: int
    numel: int
    max_abs: float


@dataclass
class Compared:
    """Result for a pair: CRC-32 of each tensor's elements in order, and the difference, if any."""

    crc32: int = 0
    second_crc32: int = 0
    difference: Difference | None = None
    record: ReadRecord = field(default_factory=ReadRecord)


class Comparer:
    """Compares pairs of tensors of equal dtype and shape, in one process."""

    def __init__(self, memory_bytes: int) -> None:
        self._band_bytes = buffer_bytes(memory_bytes) // 2
        self._reader = Reader(self._band_bytes)

    def __call__(self, pair: Pair) -> Compared:
        result = Compared()
        size = DTYPE_BYTES[pair.first.dtype]
        for assembly in (pair.first, pair.second):
            for stretch in assembly.skipped if assembly else ():
                self._reader.skip(stretch)
        ours = bands(pair.first, self._band_bytes)
        theirs = bands(pair.second, self._band_bytes) if pair.second else ours
        for band, their_band in zip(ours, theirs, strict=True):
            first = memoryview(bytearray((band.stop - band.start) * size))
            self._reader.fill(pair.first, band, first)
            result.crc32 = zlib_ng.crc32(first, result.crc32)
            if pair.second is None:
                continue
            second = memoryview(bytearray(len(first)))
            self._reader.fill(pair.second, their_band, second)
            result.second_crc32 = zlib_ng.crc32(second, result.second_crc32)
            if first != second:
                difference = _find_difference(pair.first, band.start, first, second)
                result.difference = _merge(result.difference, difference)
        result.record = self._reader.take_record()
        return result


def _find_difference(
    assembly: Assembly, start: int, first: memoryview, second: memoryview
) -> Difference:
    """Describe the difference of two bands that begin at element `start` and are not equal."""
    size = DTYPE_BYTES[assembly.dtype]
    dtype = getattr(torch, assembly.dtype)
    first_bytes = torch.frombuffer(first, dtype=torch.uint8)
    second_bytes = torch.frombuffer(second, dtype=torch.uint8)
    # Bytes are compared, so that NaNs of equal bits are equal.
    differs = (first_bytes != second_bytes).view(-1, size).any(1)
    places = differs.nonzero()[:, 0]
    first_values = torch.frombuffer(first, dtype=dtype)[places].double()
    second_values = torch.frombuffer(second, dtype=dtype)[places].double()
    return Difference(
        index=unravel(start + int(places[0]), assembly.shape),
        first=first_values[0].item(),
        second=second_values[0].item(),
        count=len(places),
        numel=assembly.num_bytes // size,
        max_abs=(first_values - second_values).abs().max().item(),
    )


def _merge(earlier: Difference | None, later: Difference) -> Difference:
    """Combine the differences of two bands of a tensor; the first element is the earlier band's."""
    if earlier is None:
        return later
    return replace(
        earlier,
        count=earlier.count + later.count,
        max_abs=max(earlier.max_abs, later.max_abs),
    )
