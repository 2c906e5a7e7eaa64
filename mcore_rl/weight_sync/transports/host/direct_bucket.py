"""A bucket whose slices the trainer rank writes to where the engine rank wants them.

trainer rank's tensors --sum--> , --copy--> engine rank's tensors --sum-->
              header and checksums --message-->                    compared

So a byte is copied once, and the engine rank sums what lies in its tensors in the end.
"""

from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from mcore_rl.weight_sync.buckets import HEADER_WORDS, Bucket, BucketPiece
from mcore_rl.weight_sync.placed_bucket import Holding, PlacedBucket
from mcore_rl.weight_sync.transports.host.one_pass import OnePass, Targets, are_rows
from mcore_rl.weight_sync.verify import XXH3


def direct_words(bucket: Bucket) -> int:
    """Return the int64 words of the message: header and checksums."""
    return HEADER_WORDS + len(bucket.pieces)


def can_be_written(bucket: Bucket, held: Sequence[Holding]) -> bool:
    """Return whether a sender can write the bucket's slices to the receiver's `held`."""
    return all(_is_writable(bucket.pieces[part.piece], part) for part in held)


def _is_writable(piece: BucketPiece, part: Holding) -> bool:
    shard = part.shard
    return shard.dtype == piece.dtype and _is_in_rows(
        piece.box.shape, piece.dtype, shard.box.shape, shard.strides
    )


@cache
def _is_in_rows(
    shape: tuple[int, ...], dtype: str, own_shape: tuple[int, ...], own_strides: tuple[int, ...]
) -> bool:
    in_piece = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    return are_rows(own_shape, own_strides, in_piece.stride(), in_piece.element_size())


class DirectBucket(PlacedBucket):
    """Binds a bucket to this rank's tensors; the sender also needs `targets` to write to.

    Its words are scratch memory: slices that lie in parts are joined there, others never are there.
    """

    targets: Targets | None = None
    """Where this bucket's slices belong on the receiver; set before the sender packs."""

    def __init__(
        self,
        bucket: Bucket,
        scratch_W: Tensor,
        held: Sequence[Holding],
        tensors: Mapping[str, Tensor],
        message_W: Tensor,
    ) -> None:
        super().__init__(bucket, scratch_W, held, tensors, message_W, XXH3)
        self._own = _compiled(self._one_pass)

    @property
    def own_targets(self) -> Targets:
        """Where the slices belong in this rank's tensors."""
        return self._own.targets

    @property
    def sums_P(self) -> Tensor:
        return self._message_W[self._sums_at].clone()

    def pack(self, version: int, sums_P: Tensor | None = None) -> None:
        """Write the slices to `targets`, and header and checksums to the message."""
        assert sums_P is None, "relays do not write into the memory of other engines"
        assert self.targets is not None, f"{self.bucket} has nowhere to go"
        self._fill_words()
        self._message_W[self._sums_at] = self._own.write(self.targets)
        self._message_W[0] = version
        self._message_W[1] = self.bucket.index

    def place(self, version: int) -> None:
        """Compare the checksums of the slices, which are in this rank's tensors, with the sender's.

        Raises TransferError as PlacedBucket.place does.
        """
        self._check_header(version, self._message_W[:HEADER_WORDS].tolist())
        self._check_sums(self._message_W[self._sums_at], self._own.sum_own())


def _compiled(one_pass: OnePass | None) -> OnePass:
    assert one_pass is not None, "ranks without a compiler do not write into other memory"
    return one_pass
