"""Writes slices straight to their places in the tensors of an engine rank on the same machine.

trainer rank's tensors --sum--> , --copy--> engine rank's tensors --sum-->
              header and checksums --message-->                    compared

So each byte is copied once, and the engine rank sums the final bytes in its tensors. Two ranks
agree once on whether one writes into the other's memory:

engine rank: WriteGrants                                  trainer rank: WriteAccess
keeps its tensors in segments
opens them or declines  <---------- abstract socket ----> asks, once
descriptors of the segments ----------------------------> maps them
grant, once per version: where its slices go -----------> writes, then tells by a message

A rank writes only to the targets of a grant, and a grant names tensors that the engine does not
use. A link whose transfer failed is never used again, and the next link does not open memory into
which ranks of the failed link may still write.
"""

import os
import socket
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache

import numpy as np
import torch
from torch import Tensor

from mcore_rl.device.gpu_memory import DeviceStream
from mcore_rl.types import Array
from mcore_rl.weight_sync.buckets import HEADER_WORDS, Bucket, BucketPiece
from mcore_rl.weight_sync.link_end import NUM_SETS, LinkEnd, connect, recv_table, send_table
from mcore_rl.weight_sync.placed_bucket import BucketEnd, Holding, PlacedBucket, RankBucket
from mcore_rl.weight_sync.transports.host.one_pass import OnePass, Targets, are_rows
from mcore_rl.weight_sync.transports.host.segment import Segment, map_segment, populate
from mcore_rl.weight_sync.transports.shared_memory import Channel, SharedMemoryTransport
from mcore_rl.weight_sync.transports.transport import Failure
from mcore_rl.weight_sync.verify import XXH3
from mcore_rl.weight_sync.waits import TransferError

_OFFER = struct.Struct("qq")
"""Bytes of the two segments; 0 for the first means no access."""
_GRANT = struct.Struct("qqq")
"""Version, number of the set of tensors, slices of the table that follows; 0: no table follows."""
_MOVE_FIELDS = 6
_ADDRESS, _OWN_STRIDE, _AT, _STRIDE, _ROWS, _ROW_BYTES = range(_MOVE_FIELDS)


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
        buckets: Sequence[tuple[int, BucketEnd]],
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


class WriteGrants:
    """An engine rank's end: sends the targets of a version's slices to one trainer rank."""

    def __init__(self, peer: socket.socket, segments: Sequence[Segment]) -> None:
        self._peer = peer
        self._segments = segments
        self._known: list[int] = []
        """Sets whose tables the peer has."""

    def grant(self, version: int, number: int, targets: Targets) -> None:
        """Have the peer write `version` to `targets`, which lie in set `number` of tensors."""
        table = b""
        if number not in self._known:
            table = self._encode(targets)
            self._known = [*self._known[1 - NUM_SETS :], number]
        message = _GRANT.pack(version, number, len(targets.counts) if table else 0)
        if table:
            send_table(self._peer, message, table, "mcore_rl_targets")
            return
        with suppress(BrokenPipeError, ConnectionResetError):  # A later wait reports the peer.
            self._peer.sendall(message)

    def close(self) -> None:
        self._peer.close()

    def _encode(self, targets: Targets) -> bytes:
        """Return counts and moves as bytes; addresses become offsets into the joined segments."""
        first, second = self._segments
        moves = targets.moves.copy()
        in_first = _are_inside(moves, first.address, first.num_bytes)
        in_second = _are_inside(moves, second.address, second.num_bytes)
        assert (in_first | in_second).all(), "a slice belongs outside the shared memory"
        moves[in_first, _ADDRESS] -= first.address
        moves[in_second, _ADDRESS] -= second.address - first.num_bytes
        return targets.counts.tobytes() + moves.tobytes()


class WriteAccess:
    """A trainer rank's end: the mapped memory of one engine rank."""

    def __init__(self, end: LinkEnd, receiver: int, peer: socket.socket, maps: Sequence[Array]):
        self._end = end
        self._receiver = receiver
        self._peer = peer
        self._maps = maps
        self._tables: dict[int, Targets] = {}

    @staticmethod
    def ask(end: LinkEnd, receiver: int, server: str) -> "WriteAccess | None":
        """Return the access to the memory that rank `receiver` opens at `server`.

        Returns None if the receiver declines. Raises TransferError if it does not answer by
        end.deadline_s.
        """
        peer = socket.socket(socket.AF_UNIX)
        try:
            connect(peer, end, server)
            data, descriptors, _, _ = socket.recv_fds(peer, _OFFER.size, NUM_SETS)
            if len(data) < _OFFER.size:
                raise ConnectionResetError("the process is gone")
        except OSError as error:
            peer.close()
            name = end.link.name_rank(receiver)
            raise TransferError(f"no memory of {name}: {error}", peer_lost=True) from error
        sizes = _OFFER.unpack(data)
        if not descriptors:
            peer.close()
            return None
        maps = []
        for descriptor, num_bytes in zip(descriptors, sizes, strict=True):
            maps.append(np.frombuffer(map_segment(descriptor, num_bytes), np.uint8))
            os.close(descriptor)
        return WriteAccess(end, receiver, peer, maps)

    def wait(self, version: int, deadline_s: float, failure: Callable[[], str | None]) -> Targets:
        """Return the targets of the slices of `version`.

        Raises TransferError as Transport.run does, or if the grant is for another version.
        """
        name = self._end.link.name_rank(self._receiver)
        what = f"{name} to say where version {version} goes"
        data, table = recv_table(self._end, self._peer, _GRANT.size, what, deadline_s, failure)
        granted, number, num_slices = _GRANT.unpack(data)
        if num_slices:
            self._tables = dict([*self._tables.items()][1 - NUM_SETS :])
            self._tables[number] = self._decode(np.frombuffer(table, np.int64), num_slices)
        if granted != version:
            raise TransferError(f"{name} waits for version {granted}, not for version {version}")
        return self._tables[number]

    def close(self) -> None:
        self._peer.close()

    def _decode(self, table: Array, num_slices: int) -> Targets:
        counts = table[:num_slices]
        moves = table[num_slices:].reshape(-1, _MOVE_FIELDS).copy()
        first, second = self._maps
        in_first = _are_inside(moves, 0, len(first))
        in_second = _are_inside(moves, len(first), len(second))
        if not (in_first | in_second).all():
            raise TransferError(
                f"{self._end.link.name_rank(self._receiver)} wants slices outside its shared memory"
            )
        moves[in_first, _ADDRESS] += first.ctypes.data
        moves[in_second, _ADDRESS] += second.ctypes.data - len(first)
        populate(moves[:, _ADDRESS], _find_stops(moves))
        return Targets(counts, moves)


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


def _check_compiled(one_pass: OnePass | None) -> OnePass:
    assert one_pass is not None, "ranks without a compiler do not write into other memory"
    return one_pass


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


def open_memory_to(end: LinkEnd, opens_to: Mapping[int, bool]) -> dict[int, "WriteGrants"]:
    """Open this rank's memory to the trainer ranks with `opens_to` true; decline all others.

    Raises TransferError, which names the ranks that did not ask by end.deadline_s.
    """
    assert end.memory is not None, "this rank offered its memory"
    segments = end.memory.segments
    grants: dict[int, WriteGrants] = {}
    for rank, peer in end.memory.server.accept(end, opens_to, "ask for its memory"):
        if opens_to[rank]:
            sizes = [segment.num_bytes for segment in segments]
            descriptors = [segment.descriptor for segment in segments]
            socket.send_fds(peer, [_OFFER.pack(*sizes)], descriptors)
            grants[rank] = WriteGrants(peer, segments)
        else:
            peer.sendall(_OFFER.pack(0, 0))
            peer.close()
    return grants


def _are_inside(moves: Array, start: int, num_bytes: int) -> Array:
    """Return for each move whether it lies wholly in `num_bytes` from address `start` on."""
    return (moves[:, _ADDRESS] >= start) & (_find_stops(moves) <= start + num_bytes)


def _find_stops(moves: Array) -> Array:
    """Return for each move the address behind its last byte."""
    last_rows = moves[:, _ADDRESS] + (moves[:, _ROWS] - 1) * moves[:, _OWN_STRIDE]
    return last_rows + moves[:, _ROW_BYTES]
