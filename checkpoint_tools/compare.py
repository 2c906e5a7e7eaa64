"""Two tensors in, where they differ out; read band by band on both sides."""

from dataclasses import dataclass, field

import torch
from zlib_ng import zlib_ng

from checkpoint_tools.assembly import Assembly
from checkpoint_tools.output import buffer_bytes
from checkpoint_tools.reader import Reader, Record, bands
from checkpoint_tools.stored import DTYPE_BYTES


@dataclass(frozen=True)
class Pair:
    """The same tensor of two checkpoints; one of them may be all there is."""

    name: str
    first: Assembly
    second: Assembly | None = None

    @property
    def num_bytes(self) -> int:
        return self.first.num_bytes + (self.second.num_bytes if self.second else 0)


@dataclass(frozen=True)
class Difference:
    """Where two tensors differ first, with the values there, and in how many elements of how many."""

    index: tuple[int, ...]
    first: float
    second: float
    count: int
    numel: int
    max_abs: float


@dataclass
class Compared:
    """CRC-32 of both tensors' elements in order, and their difference if they have one."""

    crc32: int = 0
    second_crc32: int = 0
    difference: Difference | None = None
    record: Record = field(default_factory=Record)


class Comparer:
    """Compares pairs of one dtype and shape, in one process."""

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
        for band, other in zip(ours, theirs, strict=True):
            first = memoryview(bytearray((band.stop - band.start) * size))
            self._reader.fill(pair.first, band, first)
            result.crc32 = zlib_ng.crc32(first, result.crc32)
            if pair.second is None:
                continue
            second = memoryview(bytearray(len(first)))
            self._reader.fill(pair.second, other, second)
            result.second_crc32 = zlib_ng.crc32(second, result.second_crc32)
            if first != second:
                found = _difference(pair.first, band.start, first, second)
                result.difference = _joined(result.difference, found)
        result.record = self._reader.take_record()
        return result


def _difference(
    assembly: Assembly, start: int, first: memoryview, second: memoryview
) -> Difference:
    size = DTYPE_BYTES[assembly.dtype]
    dtype = getattr(torch, assembly.dtype)
    differ = (
        (torch.frombuffer(first, dtype=torch.uint8) != torch.frombuffer(second, dtype=torch.uint8))
        .view(-1, size)
        .any(1)
    )
    where = differ.nonzero()[:, 0]
    at = int(where[0])
    a = torch.frombuffer(first, dtype=dtype)[where].double()
    b = torch.frombuffer(second, dtype=dtype)[where].double()
    return Difference(
        _index(start + at, assembly.shape),
        a[0].item(),
        b[0].item(),
        len(where),
        assembly.num_bytes // size,
        (a - b).abs().max().item(),
    )


def _joined(first: Difference | None, then: Difference) -> Difference:
    if first is None:
        return then
    count, largest = first.count + then.count, max(first.max_abs, then.max_abs)
    return Difference(first.index, first.first, first.second, count, first.numel, largest)


def _index(element: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        element, at = divmod(element, size)
        index.append(at)
    return tuple(reversed(index))
