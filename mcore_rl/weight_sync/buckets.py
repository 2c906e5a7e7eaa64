"""Packs slices into messages of bounded size. Pure: placed_bucket.py moves the bytes.

source rank's shards        bucket (one message)                        target rank's shards
q_proj rows 0-3   --->  | version index sums | q_proj | k_proj | ... |  --->  qkv_proj rows 0-3

Slices of one length lie side by side in a bucket, so that casts, checksums and placing take one
call each, however many slices there are. The scales of FP8 values lie in the same bucket as the
values.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor

from mcore_rl.weight_sync.verify import ROW_BYTES, ROW_WORDS
from mcore_rl.weights.box import Box, itemsize
from mcore_rl.weights.hf.fp8 import BLOCK, FP8
from mcore_rl.weights.plan.shared_region import Slice

HEADER_WORDS = 2
"""Weight version and bucket index. A checksum per piece follows, padded to whole rows."""
_MOST_PADDING = 1 / 8
"""A share of bucket_bytes, so that two slices of half a bucket fit into one bucket."""

_SizedSlice = tuple[Slice, int, int]
"""(slice, bytes of its values, rows of ROW_WORDS words that they take)"""


@dataclass(frozen=True)
class BucketPiece:
    """One slice in a bucket: `num_rows` rows of ROW_WORDS words, the last padded with zeros."""

    box: Box
    dtype: str
    first_word: int
    num_rows: int

    @property
    def num_bytes(self) -> int:
        return self.box.numel * itemsize(self.dtype)

    def values(self, words_W: Tensor) -> Tensor:
        """Return a view of the piece in int64 `words_W` of its bucket, in its dtype and shape."""
        words_W = words_W[self.first_word : self.first_word + self.num_rows * ROW_WORDS]
        values = words_W.view(getattr(torch, self.dtype))
        return values[: self.box.numel].view(self.box.shape)


@dataclass(frozen=True)
class Bucket:
    """Message number `index` from trainer rank `source_rank` to engine rank `target_rank`."""

    index: int
    source_rank: int
    target_rank: int
    pieces: tuple[BucketPiece, ...]

    @property
    def num_words(self) -> int:
        last = self.pieces[-1]
        return last.first_word + last.num_rows * ROW_WORDS

    @property
    def num_bytes(self) -> int:
        """Bytes of weights in the bucket, without header and padding."""
        return sum(piece.num_bytes for piece in self.pieces)

    def __str__(self) -> str:
        first = self.pieces[0].box.name
        last = self.pieces[-1].box.name
        names = first if first == last else f"{first} to {last}"
        return f"bucket {self.index} ({names})"


def bound_message_bytes(bucket_bytes: int) -> int:
    """Return the most bytes of a bucket with `bucket_bytes` of weights, its padding and header.

    Only a single row or FP8 block that is larger than `bucket_bytes` takes more.
    """
    padded_bytes = max(int(bucket_bytes * (1 + _MOST_PADDING)), bucket_bytes + ROW_BYTES)
    most_pieces = padded_bytes // ROW_BYTES
    return padded_bytes + _count_header_rows(most_pieces) * ROW_BYTES


def split_box(box: Box, max_numel: int, multiple: int = 1) -> list[Box]:
    """Cut `box` along its leading axes into boxes of at most `max_numel` elements each, in order.

    Cuts lie at multiples of `multiple` from the start of `box`, so a part may be larger than
    `max_numel` if it is no longer than `multiple` on every axis.
    """
    if box.numel <= max_numel:
        return [box]
    axis = next((i for i, size in enumerate(box.shape) if size > multiple), None)
    if axis is None:
        return [box]
    numel_per_row = box.numel // box.shape[axis]
    step = max(1, max_numel // numel_per_row // multiple) * multiple
    parts = []
    for at in range(box.start[axis], box.stop[axis], step):
        start = (*box.start[:axis], at, *box.start[axis + 1 :])
        stop = (*box.stop[:axis], min(at + step, box.stop[axis]), *box.stop[axis + 1 :])
        parts += split_box(Box(box.name, start, stop), max_numel, multiple)
    return parts


def plan_buckets(
    flows: Mapping[tuple[int, int], Iterable[Slice]], num_targets: int, bucket_bytes: int
) -> list[Bucket]:
    """Return the buckets of `flows`, (source rank, target rank) -> slices, in sending order.

    A bucket has at most `bucket_bytes` of weights, or a single larger row or FP8 block.

    Ranks that send and receive their buckets in this order cannot deadlock: both ends of a pair
    have the same order, and of all unfinished buckets, the first one is next on both of its ends.
    """
    buckets: list[Bucket] = []
    for pair, slices in flows.items():
        buckets += _plan_pair(pair, slices, bucket_bytes)

    def turn(bucket: Bucket) -> tuple[int, int, int]:
        distance = (bucket.target_rank - bucket.source_rank) % num_targets
        return bucket.index, distance, bucket.source_rank

    return sorted(buckets, key=turn)


def _plan_pair(pair: tuple[int, int], slices: Iterable[Slice], bucket_bytes: int) -> list[Bucket]:
    groups: list[list[_SizedSlice]] = [[]]
    filled_bytes = 0
    padded_bytes = 0
    for parts in _split_to_fit(slices, bucket_bytes):
        num_bytes = sum(num_bytes for _, num_bytes, _ in parts)
        num_padded = sum(num_rows for _, _, num_rows in parts) * ROW_BYTES
        is_full = (
            filled_bytes + num_bytes > bucket_bytes
            or padded_bytes + num_padded > bucket_bytes * (1 + _MOST_PADDING)
        )
        if groups[-1] and is_full:
            groups.append([])
            filled_bytes = 0
            padded_bytes = 0
        groups[-1] += parts
        filled_bytes += num_bytes
        padded_bytes += num_padded
    return [Bucket(index, *pair, _lay_out(group)) for index, group in enumerate(groups) if group]


def _split_to_fit(slices: Iterable[Slice], bucket_bytes: int) -> Iterator[list[_SizedSlice]]:
    """Yield the slices that must share a bucket: one slice, or FP8 values and their scales."""
    for whole in slices:
        sized = _measure(whole)
        if whole.dtype != FP8 and sized[1] <= bucket_bytes:
            yield [sized]
            continue
        multiple = BLOCK if whole.dtype == FP8 else 1
        max_numel = max(1, bucket_bytes // itemsize(whole.dtype))
        for box in split_box(whole.box, max_numel, multiple):
            part = Slice(box, whole.dtype)
            scales = part.scales
            yield [_measure(part)] if scales is None else [_measure(part), _measure(scales)]


def _measure(part: Slice) -> _SizedSlice:
    num_bytes = part.box.numel * itemsize(part.dtype)
    return part, num_bytes, -(-num_bytes // ROW_BYTES)


def _count_header_rows(num_pieces: int) -> int:
    return -(-(HEADER_WORDS + num_pieces) // ROW_WORDS)


def _lay_out(slices: Sequence[_SizedSlice]) -> tuple[BucketPiece, ...]:
    """Place the slices behind the header, shortest first."""
    first_word = _count_header_rows(len(slices)) * ROW_WORDS
    pieces = []
    for part, _, num_rows in sorted(slices, key=itemgetter(2)):
        pieces.append(BucketPiece(part.box, part.dtype, first_word, num_rows))
        first_word += num_rows * ROW_WORDS
    return tuple(pieces)
