"""Transfers packed into messages of bounded size: slices go in, contiguous bytes come out, and back.

source rank's shards        bucket (one message)                        target rank's shards
q_proj rows 0-3   --->  | version index sums | q_proj | k_proj | ... |  --->  qkv_proj rows 0-3

A slice is cast to the target's dtype while it is packed. Peak memory: two buckets per link and side.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.slices.box import Box, Shard
from mcore_rl.slices.plan import Transfer
from mcore_rl.stream.transport import TransferError
from mcore_rl.stream.verify import WORD_BYTES, Checksum

_UNSIGNED = 2**64 - 1
_HEADER_WORDS = 2
"""Weight version and index of the bucket; one checksum per piece follows."""


@dataclass(frozen=True)
class Piece:
    """One slice in a bucket: `num_words` 8-byte words from `first_word` on, padded at the end."""

    source: Shard
    target: Shard
    first_word: int
    num_words: int

    @property
    def num_bytes(self) -> int:
        return self.target.num_bytes


@dataclass(frozen=True)
class Bucket:
    """Message number `index` from trainer rank `source_rank` to engine rank `target_rank`."""

    index: int
    source_rank: int
    target_rank: int
    pieces: tuple[Piece, ...]

    @property
    def num_words(self) -> int:
        last = self.pieces[-1]
        return last.first_word + last.num_words

    @property
    def num_bytes(self) -> int:
        """Bytes of weights in it, without header and padding."""
        return sum(piece.num_bytes for piece in self.pieces)

    def __str__(self) -> str:
        first, last = self.pieces[0].target.box.name, self.pieces[-1].target.box.name
        return f"bucket {self.index} ({first}" + (f" to {last})" if last != first else ")")


def split_box(box: Box, max_numel: int) -> list[Box]:
    """`box` cut along its leading axes into boxes of at most `max_numel` elements each, in order."""
    if box.numel <= max_numel:
        return [box]
    axis = next(i for i, size in enumerate(box.shape) if size > 1)
    per_row = box.numel // box.shape[axis]
    step = max(1, max_numel // per_row)
    parts = []
    for at in range(box.start[axis], box.stop[axis], step):
        start = (*box.start[:axis], at, *box.start[axis + 1 :])
        stop = (*box.stop[:axis], min(at + step, box.stop[axis]), *box.stop[axis + 1 :])
        parts += split_box(Box(box.name, start, stop), max_numel)
    return parts


def plan_buckets(transfers: Iterable[Transfer], num_targets: int, bucket_bytes: int) -> list[Bucket]:
    """The messages of these transfers, each with at most `bucket_bytes` of weights.

    Every rank that works through its own buckets in the order given here makes progress: the order is
    the same on both ends of each pair, and the first unfinished message of all is first in line on both.
    """
    by_pair: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        by_pair[transfer.source_rank, transfer.target_rank].append(transfer)
    buckets = [bucket for pair, own in by_pair.items() for bucket in _pair_buckets(pair, own, bucket_bytes)]
    return sorted(
        buckets, key=lambda b: (b.index, (b.target_rank - b.source_rank) % num_targets, b.source_rank)
    )


def _pair_buckets(pair: tuple[int, int], transfers: Sequence[Transfer], bucket_bytes: int) -> list[Bucket]:
    groups: list[list[tuple[Shard, Shard]]] = [[]]
    filled_bytes = 0
    for source, target in _slices(transfers, bucket_bytes):
        num_bytes = _num_words(target) * WORD_BYTES
        if groups[-1] and filled_bytes + num_bytes > bucket_bytes:
            groups.append([])
            filled_bytes = 0
        groups[-1].append((source, target))
        filled_bytes += num_bytes
    return [Bucket(index, *pair, _layout(group)) for index, group in enumerate(groups)]


def _slices(transfers: Sequence[Transfer], bucket_bytes: int) -> Iterable[tuple[Shard, Shard]]:
    for transfer in transfers:
        max_numel = max(1, bucket_bytes * transfer.box.numel // transfer.num_bytes)
        for box in split_box(transfer.box, max_numel):
            yield transfer.source.within(box), transfer.target.within(box)


def _num_words(target: Shard) -> int:
    return -(-target.num_bytes // WORD_BYTES)


def _layout(slices: Sequence[tuple[Shard, Shard]]) -> tuple[Piece, ...]:
    at = _HEADER_WORDS + len(slices)
    pieces = []
    for source, target in slices:
        pieces.append(Piece(source, target, at, _num_words(target)))
        at += pieces[-1].num_words
    return tuple(pieces)


class Packer:
    """Fills and empties the messages of one link, checksummed on both sides while the bytes are in cache."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.max_words = max((bucket.num_words for bucket in buckets), default=0)
        self._checksum = Checksum(self.max_words * WORD_BYTES)

    def make_buffer(self) -> Tensor:
        """int64 [max_words], large enough for any of the buckets."""
        return torch.zeros(self.max_words, dtype=torch.int64)

    def pack(self, bucket: Bucket, version: int, tensors: Mapping[str, Tensor], buffer_W: Tensor) -> Tensor:
        """Fill the buffer from the sender's tensors; returns the uint8 view to send."""
        sums = [version, bucket.index]
        for piece in bucket.pieces:
            words_W = buffer_W[piece.first_word : piece.first_word + piece.num_words]
            _values(words_W, piece).copy_(piece.source.view(tensors))
            sums.append(self._checksum(words_W, piece.first_word))
        buffer_W[: len(sums)] = torch.tensor(sums)
        return message(bucket, buffer_W)

    def unpack(self, bucket: Bucket, version: int, tensors: Mapping[str, Tensor], buffer_W: Tensor) -> None:
        """Verify the received buffer, copy it into the receiver's tensors; TransferError names the slice."""
        header = buffer_W[: _HEADER_WORDS + len(bucket.pieces)].tolist()
        if header[:_HEADER_WORDS] != [version, bucket.index]:
            raise TransferError(
                f"trainer rank {bucket.source_rank} sent version {header[0]} bucket {header[1]}"
                f" where engine rank {bucket.target_rank} expected version {version} bucket {bucket.index}"
            )
        for piece, expected in zip(bucket.pieces, header[_HEADER_WORDS:], strict=True):
            words_W = buffer_W[piece.first_word : piece.first_word + piece.num_words]
            found = self._checksum(words_W, piece.first_word)
            if found != expected:
                box = piece.target.box
                raise TransferError(
                    f"{box.name} {box.start} to {box.stop}, bound for {piece.target.tensor}, has checksum"
                    f" {found & _UNSIGNED:#x} on engine rank {bucket.target_rank},"
                    f" {expected & _UNSIGNED:#x} on trainer rank {bucket.source_rank}"
                )
            piece.target.view(tensors).copy_(_values(words_W, piece))


def message(bucket: Bucket, buffer_W: Tensor) -> Tensor:
    """The bytes of `bucket` in a buffer, uint8."""
    return buffer_W[: bucket.num_words].view(torch.uint8)


def _values(words_W: Tensor, piece: Piece) -> Tensor:
    """The words as the slice's values, in the target's dtype and shape."""
    values = words_W.view(getattr(torch, piece.target.dtype))
    return values[: piece.target.box.numel].view(piece.target.box.shape)
