"""Slices packed into messages of bounded size: a rank's tensors go in, contiguous bytes come out, and back.

source rank's shards        bucket (one message)                        target rank's shards
q_proj rows 0-3   --->  | version index sums | q_proj | k_proj | ... |  --->  qkv_proj rows 0-3

A slice is cast to the target's dtype while it is packed; FP8 values are computed then, with the scales of
their blocks, which lie in the same bucket. Slices of one length lie side by side in a bucket, so that casts,
sums and placing take one call each, however many slices it has. Each end knows where a slice lies in its own
memory only; it may lie there in several pieces.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.slices.box import Box, Shard, itemsize
from mcore_rl.slices.hf.fp8 import BLOCK, FP8, scale_box
from mcore_rl.slices.hf.quantize import quantize_into
from mcore_rl.slices.plan.shared_region import Slice
from mcore_rl.stream.routes.copies import Copies
from mcore_rl.stream.routes.transport import TransferError
from mcore_rl.stream.verify import ROW_WORDS, WORD_BYTES, Checksums

_UNSIGNED = 2**64 - 1
_ROW_BYTES = ROW_WORDS * WORD_BYTES
_HEADER_WORDS = 2
"""Weight version and index of the bucket; one checksum per piece follows, up to the next whole row."""


@dataclass(frozen=True)
class Piece:
    """One slice in a bucket: `num_rows` rows of ROW_WORDS words from `first_word` on, zeros at the end."""

    box: Box
    dtype: str
    first_word: int
    num_rows: int

    @property
    def num_bytes(self) -> int:
        return self.box.numel * itemsize(self.dtype)

    def values(self, words_W: Tensor) -> Tensor:
        """The piece in int64 `words_W` of its bucket, in its dtype and shape."""
        words_W = words_W[self.first_word : self.first_word + self.num_rows * ROW_WORDS]
        values = words_W.view(getattr(torch, self.dtype))
        return values[: self.box.numel].view(self.box.shape)


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
        return last.first_word + last.num_rows * ROW_WORDS

    @property
    def num_bytes(self) -> int:
        """Bytes of weights in it, without header and padding."""
        return sum(piece.num_bytes for piece in self.pieces)

    def __str__(self) -> str:
        first, last = self.pieces[0].box.name, self.pieces[-1].box.name
        return f"bucket {self.index} ({first}" + (f" to {last})" if last != first else ")")


def split_box(box: Box, max_numel: int, multiple: int = 1) -> list[Box]:
    """`box` cut along its leading axes into boxes of at most `max_numel` elements each, in order.

    Boxes are cut at multiples of `multiple` from where `box` begins, and are no smaller.
    """
    axis = next((i for i, size in enumerate(box.shape) if size > multiple), None)
    if box.numel <= max_numel or axis is None:
        return [box]
    per_row = box.numel // box.shape[axis]
    step = max(1, max_numel // per_row // multiple) * multiple
    parts = []
    for at in range(box.start[axis], box.stop[axis], step):
        start = (*box.start[:axis], at, *box.start[axis + 1 :])
        stop = (*box.stop[:axis], min(at + step, box.stop[axis]), *box.stop[axis + 1 :])
        parts += split_box(Box(box.name, start, stop), max_numel, multiple)
    return parts


def plan_buckets(
    flows: Mapping[tuple[int, int], Iterable[Slice]], num_targets: int, bucket_bytes: int
) -> list[Bucket]:
    """The messages of `flows`, from (source, target) rank, each with at most `bucket_bytes` of weights or a
    single row or FP8 block of them.

    Every rank that works through its own buckets in the order given here makes progress: the order is
    the same on both ends of each pair, and the first unfinished message of all is first in line on both.
    """
    buckets = [
        bucket for pair, own in flows.items() for bucket in _pair_buckets(pair, own, bucket_bytes)
    ]
    return sorted(
        buckets,
        key=lambda b: (b.index, (b.target_rank - b.source_rank) % num_targets, b.source_rank),
    )


def _pair_buckets(
    pair: tuple[int, int], slices: Iterable[Slice], bucket_bytes: int
) -> list[Bucket]:
    groups: list[list[Slice]] = [[]]
    filled_bytes = 0
    for parts in _bounded(slices, bucket_bytes):
        num_bytes = sum(map(_num_rows, parts)) * _ROW_BYTES
        if groups[-1] and filled_bytes + num_bytes > bucket_bytes:
            groups.append([])
            filled_bytes = 0
        groups[-1] += parts
        filled_bytes += num_bytes
    return [Bucket(index, *pair, _layout(group)) for index, group in enumerate(groups) if group]


def _bounded(slices: Iterable[Slice], bucket_bytes: int) -> Iterable[list[Slice]]:
    """What goes into one bucket together: a slice, or FP8 values and their scales."""
    for whole in slices:
        multiple = BLOCK if whole.dtype == FP8 else 1
        for box in split_box(whole.box, max(1, bucket_bytes // itemsize(whole.dtype)), multiple):
            part = Slice(box, whole.dtype)
            yield [part] if part.scales is None else [part, part.scales]


def _num_rows(part: Slice) -> int:
    return -(-part.box.numel * itemsize(part.dtype) // _ROW_BYTES)


def _layout(slices: Sequence[Slice]) -> tuple[Piece, ...]:
    at = -(-(_HEADER_WORDS + len(slices)) // ROW_WORDS) * ROW_WORDS
    pieces = []
    for part in sorted(slices, key=_num_rows):
        pieces.append(Piece(part.box, part.dtype, at, _num_rows(part)))
        at += pieces[-1].num_rows * ROW_WORDS
    return tuple(pieces)


@dataclass(frozen=True)
class Holding:
    """Where a rank holds what of piece number `piece` of a bucket."""

    piece: int
    within: tuple[slice, ...]
    """The part, counted from the piece's own start."""
    shard: Shard


def holdings(bucket: Bucket, shards: Mapping[str, Sequence[Shard]]) -> list[Holding]:
    """Where all of the bucket lies in a rank's `shards` (by HF name), in as many pieces as that takes.

    Scales that the rank is to compute lie nowhere yet.
    """
    found = []
    computed = {scale_box(piece.box) for piece in bucket.pieces if piece.dtype == FP8}
    for i, piece in enumerate(bucket.pieces):
        box, num_held = piece.box, 0
        own = shards.get(box.name, ())
        if not own and box in computed:
            continue
        for shard in own:
            common = box.intersect(shard.box)
            if common is not None:
                steps = zip(common.start, common.stop, box.start, strict=True)
                within = tuple(slice(start - first, stop - first) for start, stop, first in steps)
                found.append(Holding(i, within, shard.within(common)))
                num_held += common.numel
        assert num_held >= box.numel, (
            f"{box} is planned, but only {num_held} elements of it are here"
        )
    return found


@dataclass(frozen=True)
class _Matrix:
    """A matrix to be quantised: where it lies, by the part of it that lies there, and where its blocks go."""

    parts_NK: Sequence[tuple[tuple[slice, ...], Tensor]]
    values_NK: Tensor
    scales_nk: Tensor

    def quantise(self) -> None:
        """A matrix that lies in several parts is put together first, as blocks may span them."""
        weights_NK = self.parts_NK[0][1]
        if len(self.parts_NK) > 1:
            weights_NK = torch.empty_like(self.values_NK, dtype=weights_NK.dtype)
            for within, part in self.parts_NK:
                weights_NK[within] = part
        quantize_into(weights_NK, self.values_NK, self.scales_nk)


class PlacedBucket:
    """A bucket, the memory it travels in, and the parts of this rank's own tensors that belong to it."""

    def __init__(
        self,
        bucket: Bucket,
        words_W: Tensor,
        held: Sequence[Holding],
        tensors: Mapping[str, Tensor],
        message_W: Tensor | None = None,
    ) -> None:
        """`words_W`: int64 [bucket.num_words] on the device of `tensors`; `held`: all of the bucket, in
        `tensors`; `message_W`: where the bucket travels, if elsewhere, to which it takes one copy.
        """
        self.bucket, self._words_W, self._held = bucket, words_W, held
        self._message_W = words_W if message_W is None else message_W
        values = [piece.values(words_W) for piece in bucket.pieces]
        index = {piece.box: i for i, piece in enumerate(bucket.pieces)}
        matrices: dict[int, list[Holding]] = defaultdict(list)
        pairs = []
        for part in held:
            if bucket.pieces[part.piece].dtype == FP8 != part.shard.dtype:
                matrices[part.piece].append(part)
            else:
                pairs.append((part.shard.view(tensors), values[part.piece][part.within]))
        self._copies = Copies(pairs)
        self._matrices = [
            _Matrix(
                [(part.within, part.shard.view(tensors)) for part in parts],
                values[i],
                values[index[scale_box(bucket.pieces[i].box)]],
            )
            for i, parts in matrices.items()
        ]
        self._sums_at = slice(_HEADER_WORDS, _HEADER_WORDS + len(bucket.pieces))
        first_word = bucket.pieces[0].first_word
        ends = [piece.first_word // ROW_WORDS + piece.num_rows - 1 for piece in bucket.pieces]
        self._last_rows_P = torch.tensor(ends, device=words_W.device)
        self._checksums = Checksums(
            first_word, [piece.num_rows for piece in bucket.pieces], words_W.device
        )

    @property
    def message_u8(self) -> Tensor:
        return self._message_W.view(torch.uint8)

    @property
    def sums_P(self) -> Tensor:
        """int64 [pieces], a copy: the checksums that its sender took."""
        return self._words_W[self._sums_at].clone()

    def pack(self, version: int, sums_P: Tensor | None = None) -> None:
        """Fill the bucket from this rank's slices; the sums are taken while the bytes are in cache.

        `sums_P`: those that the slices came with, if they are only passed on.
        """
        self._words_W.view(-1, ROW_WORDS).index_fill_(0, self._last_rows_P, 0)
        self._copies.to_right()
        for matrix in self._matrices:
            matrix.quantise()
        self._words_W[self._sums_at] = self._checksums(self._words_W) if sums_P is None else sums_P
        self._words_W[0], self._words_W[1] = version, self.bucket.index
        if self._message_W is not self._words_W:
            self._message_W.copy_(self._words_W)

    def verify(self, version: int) -> None:
        """Compare the received bytes with the sender's sums; TransferError names the slice.

        Waits for the device once.
        """
        bucket = self.bucket
        if self._message_W is not self._words_W:
            self._words_W.copy_(self._message_W)
        told_W = torch.cat(
            (self._words_W[: self._sums_at.stop], self._checksums(self._words_W))
        ).cpu()
        header = told_W[:_HEADER_WORDS].tolist()
        if header != [version, bucket.index]:
            raise TransferError(
                f"trainer rank {bucket.source_rank} sent version {header[0]} bucket {header[1]}"
                f" where engine rank {bucket.target_rank} expected version {version} bucket {bucket.index}"
            )
        expected, found = told_W[self._sums_at], told_W[self._sums_at.stop :]
        if not torch.equal(expected, found):
            first = int((expected != found).nonzero()[0])
            box = bucket.pieces[first].box
            tensor = next(part.shard.tensor for part in self._held if part.piece == first)
            raise TransferError(
                f"{box.name} {box.start} to {box.stop}, bound for {tensor}, has checksum"
                f" {int(found[first]) & _UNSIGNED:#x} on engine rank {bucket.target_rank},"
                f" {int(expected[first]) & _UNSIGNED:#x} on trainer rank {bucket.source_rank}"
            )

    def place(self) -> None:
        """Copy the received slices into this rank's own tensors."""
        self._copies.to_left()
