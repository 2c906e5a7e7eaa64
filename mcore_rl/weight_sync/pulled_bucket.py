"""A bucket whose slices the engine rank reads from the trainer rank's own GPU memory.

trainer rank's storages --sum--> checksums --message-->         compared
                        \\______ read, sum, write ______> engine rank's tensors

The message has header and checksums alone. The trainer rank tells once where its slices lie in its
storages (`Sources`), and at each version where its storages lie. Each side may hold a slice in
parts of its own; `join_rows` cuts rows that are whole on both sides.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mcore_rl.device.pull_kernels import PullRows
from mcore_rl.types import Array
from mcore_rl.weight_sync.buckets import HEADER_WORDS, Bucket
from mcore_rl.weight_sync.placed_bucket import BucketEnd, Holding
from mcore_rl.weight_sync.transports.host.one_pass import list_rows


class HeldRows(NamedTuple):
    """Rows of a slice in the memory of one rank; sizes and distances in bytes.

    storage    number of the storage that has them; 0 on an engine rank
    first      offset of the first row in the storage; on an engine rank its address
    at, ...    as in PullRows
    """

    storage: int
    first: int
    own_stride: int
    at: int
    stride: int
    num_rows: int
    row_bytes: int

    @property
    def is_dense(self) -> bool:
        return self.num_rows == 1 or self.own_stride == self.stride == self.row_bytes


class Sources(NamedTuple):
    """Where the slices of some buckets lie in a trainer rank's storages.

    counts  int64 [slices], parts of each slice
    parts   int64 [parts, 7], HeldRows
    """

    counts: Array
    parts: Array

    @staticmethod
    def join(slices: Sequence[Sequence[HeldRows]]) -> "Sources":
        counts = np.array([len(parts) for parts in slices], np.int64)
        parts = [part for each in slices for part in each]
        return Sources(counts, np.array(parts, np.int64).reshape(-1, len(HeldRows._fields)))

    def split(self) -> Iterator[list[HeldRows]]:
        """Yield the parts of each slice."""
        at = 0
        for count in self.counts.tolist():
            yield [HeldRows(*part) for part in self.parts[at : at + count].tolist()]
            at += count
        assert at == len(self.parts), f"{len(self.parts) - at} parts are left over"


class Storages:
    """The storages of a trainer rank's tensors, numbered in the order in which they are met."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._storages: list[Any] = []

    def number(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        number = self._numbers.setdefault(storage._cdata, len(self._storages))
        if number == len(self._storages):
            self._storages.append(storage)
        return number

    @property
    def addresses(self) -> list[int]:
        """Where the storages lie now."""
        return [storage.data_ptr() for storage in self._storages]


class PulledBucket(BucketEnd):
    """A bucket bound to this rank's tensors; `computed_P` holds the sums of the last version."""

    computed_P: Tensor | None = None
    """int64 [pieces] on the host; set before `pack` and `place`."""

    def __init__(
        self,
        bucket: Bucket,
        held: Sequence[Holding],
        tensors: Mapping[str, Tensor],
        message_W: Tensor,
        storages: Storages | None = None,
    ) -> None:
        """Bind `bucket`; a trainer rank passes the `storages` that its rows are counted from."""
        super().__init__(bucket, held, message_W)
        self.slices = _find_rows(bucket, held, tensors, storages)
        """The parts of each piece in this rank's memory."""

    def pack(self, version: int, sums_P: Tensor | None = None) -> None:
        """Write header and checksums to the message."""
        assert sums_P is None, "engines that pass weights on do not open their memory"
        assert self.computed_P is not None, f"{self.bucket} was not summed"
        self._message_W[0] = version
        self._message_W[1] = self.bucket.index
        self._message_W[self._sums_at] = self.computed_P

    def place(self, version: int) -> None:
        """Compare the checksums of the bytes that were pulled with the sender's checksums.

        Raises TransferError as BucketEnd.place does.
        """
        assert self.computed_P is not None, f"{self.bucket} was not pulled"
        self._check_header(version, self._message_W[:HEADER_WORDS].tolist())
        self._check_sums(self._message_W[self._sums_at], self.computed_P)


def _find_rows(
    bucket: Bucket,
    held: Sequence[Holding],
    tensors: Mapping[str, Tensor],
    storages: Storages | None,
) -> list[list[HeldRows]]:
    """Return the parts of each of the bucket's pieces in this rank's memory."""
    slices: list[list[HeldRows]] = [[] for _ in bucket.pieces]
    for part in held:
        piece = bucket.pieces[part.piece]
        own = part.shard.view(tensors)
        itemsize = own.element_size()
        in_piece = torch.empty(piece.box.shape, dtype=own.dtype, device="meta")[part.within]
        if storages is None:
            storage, first = 0, own.data_ptr()
        else:
            storage, first = storages.number(own), int(own.storage_offset()) * itemsize
        at = int(in_piece.storage_offset()) * itemsize
        slices[part.piece] += [
            HeldRows(storage, first + step, own_stride, at + from_at, stride, rows, row_bytes)
            for step, own_stride, from_at, stride, rows, row_bytes in list_rows(
                own.shape, own.stride(), in_piece.stride(), itemsize
            )
        ]
    return slices


def make_sum_rows(slices: Iterable[Sequence[HeldRows]]) -> Iterator[PullRows]:
    """Yield the rows that a trainer rank sums."""
    for number, parts in enumerate(slices):
        for part in parts:
            own = part.storage, part.first, part.own_stride, 0, 0
            yield PullRows(*own, part.at, part.stride, part.num_rows, part.row_bytes, number)


def join_rows(
    sources: Iterable[Sequence[HeldRows]], targets: Iterable[Sequence[HeldRows]]
) -> Iterator[PullRows]:
    """Yield the rows that an engine rank copies: parts of each slice that both sides have whole.

    sources, targets  the parts of the same slices on the trainer's and on the engine's side
    """
    for number, (theirs, own) in enumerate(zip(sources, targets, strict=True)):
        if len(theirs) == 1 and theirs[0].is_dense:
            yield from (_pull_from_dense(theirs[0], part, number) for part in own)
        elif len(own) == 1 and own[0].is_dense:
            yield from (_pull_to_dense(part, own[0], number) for part in theirs)
        else:
            yield from _meet_rows(theirs, own, number)


def _pull_from_dense(source: HeldRows, target: HeldRows, number: int) -> PullRows:
    """Return the target's rows, read from a source that lies end to end."""
    first = source.first + target.at - source.at
    place = target.first, target.own_stride, target.at, target.stride
    rows = target.num_rows, target.row_bytes
    return PullRows(source.storage, first, target.stride, *place, *rows, number)


def _pull_to_dense(source: HeldRows, target: HeldRows, number: int) -> PullRows:
    """Return the source's rows, written to a target that lies end to end."""
    place = target.first + source.at - target.at, source.stride, source.at, source.stride
    rows = source.num_rows, source.row_bytes
    return PullRows(source.storage, source.first, source.own_stride, *place, *rows, number)


def _meet_rows(
    sources: Sequence[HeldRows], targets: Sequence[HeldRows], number: int
) -> Iterator[PullRows]:
    """Yield a row for each stretch that rows of both sides have in common."""
    theirs = sorted(_list_single(sources))
    own = sorted(_list_single(targets))
    i = j = 0
    while i < len(theirs) and j < len(own):
        their_at, their_stop, storage, source = theirs[i]
        own_at, own_stop, _, target = own[j]
        at, stop = max(their_at, own_at), min(their_stop, own_stop)
        if at < stop:
            size = stop - at
            first, place = source + at - their_at, target + at - own_at
            yield PullRows(storage, first, size, place, size, at, size, 1, size, number)
        i += their_stop == stop
        j += own_stop == stop


def _list_single(parts: Sequence[HeldRows]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (start in the slice, stop, storage, first byte) of each row."""
    for part in parts:
        for row in range(part.num_rows):
            at = part.at + row * part.stride
            first = part.first + row * part.own_stride
            yield at, at + part.row_bytes, part.storage, first
