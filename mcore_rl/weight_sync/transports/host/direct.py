"""Writes slices straight to their places in the tensors of an engine rank on the same machine.

trainer rank's tensors --sum--> , --copy--> engine rank's tensors --sum-->
              header and checksums --message-->                    compared

So each byte is copied once, and the engine rank sums the final bytes in its tensors. Two ranks
agree once on whether one writes into the other's memory (open_memory.py). For each version, the
engine rank sends the targets of its slices.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from mcore_rl.device.gpu_memory import DeviceStream
from mcore_rl.weight_sync.buckets import HEADER_WORDS, Bucket, BucketPiece
from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.placed_bucket import Holding, PlacedBucket, RankBucket
from mcore_rl.weight_sync.transports.host.one_pass import OnePass, Targets, are_rows
from mcore_rl.weight_sync.transports.host.open_memory import (
    WriteAccess,
    WriteGrants,
    open_memory_to,
)
from mcore_rl.weight_sync.transports.shared_memory import Channel, SharedMemoryTransport
from mcore_rl.weight_sync.transports.transport import Failure
from mcore_rl.weight_sync.verify import XXH3


def count_direct_words(bucket: Bucket) -> int:
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

    The bucket's words are scratch memory, used only to join slices that lie in parts.
    """

    targets: Targets | None = None
    """Places of this bucket's slices on the receiver; set before the sender packs."""

    def __init__(
        self,
        bucket: Bucket,
        scratch_W: Tensor,
        held: Sequence[Holding],
        tensors: Mapping[str, Tensor],
        message_W: Tensor,
    ) -> None:
        super().__init__(bucket, scratch_W, held, tensors, message_W, XXH3)
        self._own = _check_compiled(self._one_pass)

    @property
    def own_targets(self) -> Targets:
        """Places of the slices in this rank's tensors."""
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
        """Compare the checksums of the slices in this rank's tensors with the sender's checksums.

        Raises TransferError as PlacedBucket.place does.
        """
        self._check_header(version, self._message_W[:HEADER_WORDS].tolist())
        self._check_sums(self._message_W[self._sums_at], self._own.sum_own())


def _check_compiled(one_pass: OnePass | None) -> OnePass:
    assert one_pass is not None, "ranks without a compiler do not write into other memory"
    return one_pass


class DirectWrites:
    """One rank's grants to its peers, or its access to the peers' memory.

    peers  ranks, numbered over the link, whose buckets are DirectBuckets
    """

    def __init__(
        self, end: LinkEnd, servers: Mapping[int, str], writable: Callable[[int], bool]
    ) -> None:
        """Agree with each peer in `servers`; TransferError names a peer that does not answer.

        servers   as RankPlan.direct, without peers that exchange nothing with this rank
        writable  a receiver's peer -> whether the peer can write all of its slices
        """
        self._grants: dict[int, WriteGrants] = {}
        self._access: dict[int, WriteAccess] = {}
        if end.is_sender:
            for peer, server in servers.items():
                access = WriteAccess.ask(end, peer, server)
                if access is not None:
                    self._access[peer] = access
        elif servers:
            self._grants = open_memory_to(end, {peer: writable(peer) for peer in servers})

    @property
    def peers(self) -> frozenset[int]:
        return frozenset((*self._grants, *self._access))

    def grant(self, version: int, number: int, buckets: Iterable[tuple[int, DirectBucket]]) -> None:
        """Have the peers write `version` into their buckets' tensors, set number `number`."""
        for peer, theirs in _group_by_peer(buckets).items():
            targets = [bucket.own_targets for bucket in theirs]
            counts = np.concatenate([each.counts for each in targets])
            moves = np.concatenate([each.moves for each in targets])
            self._grants[peer].grant(version, number, Targets(counts, moves))

    def wait(
        self,
        version: int,
        buckets: Iterable[tuple[int, DirectBucket]],
        deadline_s: float,
        failure: Failure,
    ) -> None:
        """Set the targets of the peers' buckets once all of them have granted `version`.

        Raises TransferError as Transport.run does.
        """
        for peer, theirs in _group_by_peer(buckets).items():
            targets = self._access[peer].wait(version, deadline_s, failure)
            for bucket, own in zip(theirs, _split(targets, theirs), strict=True):
                bucket.targets = own

    def close(self) -> None:
        for end in (*self._grants.values(), *self._access.values()):
            end.close()


class DirectTransport(SharedMemoryTransport):
    """Writes slices directly; messages have only header and checksums."""

    def __init__(
        self,
        end: LinkEnd,
        channels: Mapping[int, Channel],
        stream: DeviceStream,
        slots: Sequence[slice],
        writes: DirectWrites,
    ) -> None:
        """Make the transport to `writes.peers`, over their `channels` and `slots`."""
        super().__init__(end, channels, stream, slots)
        self._writes = writes

    @property
    def num_ahead(self) -> int:
        return sys.maxsize  # Each message has a slot of its own.

    def bind(
        self,
        own: RankBucket,
        tensors: Mapping[str, Tensor],
        message_W: Tensor,
        scratch_W: Tensor,
        sums: str,
    ) -> DirectBucket:
        assert sums == XXH3, f"checksums of kind {sums} are not taken while slices are written"
        words_W = scratch_W[: own.bucket.num_words]
        return DirectBucket(own.bucket, words_W, own.held, tensors, message_W)

    def begin(
        self,
        version: int,
        set_number: int,
        buckets: Sequence[tuple[int, PlacedBucket]],
        deadline_s: float,
        failure: Failure,
    ) -> None:
        """Send the targets of `version` to the peers, or wait for the peers' targets."""
        direct = [(peer, each) for peer, each in buckets if isinstance(each, DirectBucket)]
        if self._end.is_sender:
            self._writes.wait(version, direct, deadline_s, failure)
        else:
            self._writes.grant(version, set_number, direct)

    def close(self) -> None:
        self._writes.close()
        super().close()


def _group_by_peer(buckets: Iterable[tuple[int, DirectBucket]]) -> dict[int, list[DirectBucket]]:
    by_peer: dict[int, list[DirectBucket]] = defaultdict(list)
    for peer, bucket in buckets:
        by_peer[peer].append(bucket)
    return by_peer


def _split(targets: Targets, buckets: Sequence[DirectBucket]) -> Iterator[Targets]:
    """Yield the targets of each bucket, whose slices follow one another in `targets`."""
    slice_at = 0
    move_at = 0
    for bucket in buckets:
        counts = targets.counts[slice_at : slice_at + len(bucket.bucket.pieces)]
        num_moves = int(counts.sum())
        yield Targets(counts, targets.moves[move_at : move_at + num_moves])
        slice_at += len(counts)
        move_at += num_moves
    assert (slice_at, move_at) == (len(targets.counts), len(targets.moves)), "slices are left over"
