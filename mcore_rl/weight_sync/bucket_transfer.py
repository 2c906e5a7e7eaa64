"""Moves one rank's buckets over one transport, from its own tensors to those of its peers.

    trainer ranks --- transfer ---> engine A, rank r --- transfer ---> engine B, rank r --- ...

Each rank works through its buckets in an order that is the same on both ends of each pair.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from mcore_rl.device.gpu_memory import DeviceStream
from mcore_rl.process.gc_pause import pause_collections
from mcore_rl.weight_sync.buckets import Bucket
from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.placed_bucket import Holding, PlacedBucket
from mcore_rl.weight_sync.transports.choice import MakeTransport
from mcore_rl.weight_sync.transports.host.direct_bucket import (
    DirectBucket,
    can_be_written,
    direct_words,
)
from mcore_rl.weight_sync.transports.host.direct_writes import DirectWrites
from mcore_rl.weight_sync.transports.transport import TransferError
from mcore_rl.weight_sync.verified_buckets import VerifiedBuckets
from mcore_rl.weight_sync.verify import WORD_BYTES

NUM_SLOTS = 4
"""Buckets in flight, at most: per pair of ranks on one machine, per rank between machines."""


@dataclass(frozen=True)
class RankBucket:
    """A bucket as one of its two ranks sees it.

    peer  the rank at the other end, counted over the link
    held  where the bucket lies in this rank's tensors
    """

    bucket: Bucket
    peer: int
    held: Sequence[Holding]


class BucketTransfer:
    """One rank's buckets, the memory they travel in, and the transport that moves them.

    Memory: NUM_SLOTS buckets for each pair of ranks that share memory, and NUM_SLOTS for all other
    peers together; one bucket for all peers of which one writes into the other's tensors. What is
    not shared is taken with the first version, which may never come over this link. A bucket whose
    message cannot lie on `end.device` is packed and verified in scratch memory there and takes one
    more copy.
    """

    def __init__(
        self,
        end: LinkEnd,
        buckets: Sequence[RankBucket],
        make_transport: MakeTransport,
        sums: str,
        direct: Mapping[int, str] | None = None,
    ) -> None:
        """Connect to all peers; TransferError names one that is not there by end.deadline_s.

        All ranks pass the same kind of checksums, `sums`. `direct` is as in RankPlan; None over
        links between engines.
        """
        self.link = end.link
        self._name = end.name
        self._store = end.store
        self._buckets = buckets
        self._device = end.device
        self._sums = sums
        peers = {own.peer for own in buckets}
        servers = {peer: server for peer, server in (direct or {}).items() if peer in peers}
        self._direct = DirectWrites(end, servers, self._can_be_written)
        self._offsets, shared_words = plan_slots(buckets, self._direct.peers)
        self._stream = DeviceStream(end.device)
        with torch.inference_mode(False), self._stream.running():
            self._transport = make_transport(end, shared_words, self._stream)
            for peer in self._direct.peers:
                if self._transport.memory(peer) is None:
                    self._direct.drop(peer)
        are_direct = all(own.peer in self._direct.peers for own in buckets)
        self._most_pending = len(buckets) if are_direct else NUM_SLOTS - 1
        """Messages that a sender may leave unread while it packs another."""
        tensor_names = (part.shard.tensor for own in buckets for part in own.held)
        self._tensor_names = list(dict.fromkeys(tensor_names))
        self._bound: list[_Bound] = []
        """The last two sets of tensors: an engine's two sets take turns."""

    def send(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        deadline_s: float,
        verified: VerifiedBuckets | None = None,
    ) -> None:
        """Cast, checksum and send all slices; one bucket is packed while others travel.

        A relay passes `verified`: each bucket is forwarded once it is verified, with the checksums
        it came with. Raises TransferError when time.monotonic() passes `deadline_s`, or the link
        fails.
        """
        with self._failures_shared(), self._stream.running():
            bound = self._bind(tensors)
            self._direct.wait(version, self._direct_of(bound), deadline_s, self._store.failure)
            for i, placed in enumerate(bound.buckets):
                self._run(deadline_s, self._most_pending)
                sums_P = None if verified is None else verified.wait(i, deadline_s)
                placed.pack(version, sums_P)
                peer = self._buckets[i].peer
                what = _describe(version, placed)
                self._transport.send(placed.message_u8, peer, what, placed.bucket.index)
            self._run(deadline_s)

    def receive(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        deadline_s: float,
        verified: VerifiedBuckets | None = None,
    ) -> list[Tensor]:
        """Receive, verify and place all slices; one bucket is placed while others travel.

        Returns the checksums that each bucket's sender took, int64 [slices]. Buckets are added to
        `verified`, if given, once they are placed. Raises TransferError when
        time.monotonic() passes `deadline_s`, the link fails, or a checksum differs.
        """
        sums: list[Tensor] = []
        with self._failures_shared(), self._stream.running():
            bound = self._bind(tensors)
            buckets = bound.buckets
            self._direct.grant(version, bound.number, self._direct_of(bound))
            unstarted = iter(range(len(buckets)))
            self._start_recvs(version, buckets, islice(unstarted, NUM_SLOTS - 1))
            for i, placed in enumerate(buckets):
                self._start_recvs(version, buckets, islice(unstarted, 1))
                self._run(deadline_s, min(NUM_SLOTS, len(buckets) - i) - 1)
                placed.place(version)
                sums.append(placed.sums_P)
                if verified is not None:
                    self._stream.synchronize()
                    verified.add(sums[-1])
            self._run(deadline_s)
        return sums

    def take_saved(self) -> int:
        """Return the bytes that did not travel because they were as before, since the last call."""
        return self._transport.take_saved()

    def close(self) -> None:
        """Leave; peers that wait for this rank fail at once."""
        self._direct.close()
        self._transport.close()

    @contextmanager
    def _failures_shared(self) -> Iterator[None]:
        """Report a failure here to the other ranks of the link, which then stop waiting."""
        try:
            yield
        except Exception as error:
            own = f"{self._name}: {error}"
            first = self._store.fail(own)
            if first not in own:
                raise TransferError(f"{error}; before that, {first}", peer_lost=True) from error
            raise

    def _run(self, deadline_s: float, pending: int = 0) -> None:
        self._transport.run(deadline_s, self._store.failure, pending)

    def _start_recvs(
        self, version: int, buckets: Sequence[PlacedBucket], indices: Iterable[int]
    ) -> None:
        for i in indices:
            peer = self._buckets[i].peer
            what = _describe(version, buckets[i])
            self._transport.recv(buckets[i].message_u8, peer, what, buckets[i].bucket.index)

    @cached_property
    def _scratch_W(self) -> Tensor:
        """Int64 words for the largest bucket that is not packed and verified in its message."""
        elsewhere = [
            own.bucket.num_words
            for own, words in zip(self._buckets, self._messages_W, strict=True)
            if own.peer in self._direct.peers or words.device != self._device
        ]
        return _allocate_words(max(elsewhere, default=0), self._device)

    @cached_property
    def _messages_W(self) -> list[Tensor]:
        """The int64 words in which each bucket travels, shared with its peer if possible."""
        messages: list[Tensor | None] = []
        own_by_device: dict[torch.device, list[int]] = defaultdict(list)
        for i, (own, offset) in enumerate(zip(self._buckets, self._offsets, strict=True)):
            shared_W = self._transport.memory(own.peer)
            if shared_W is None:
                own_by_device[self._transport.device(own.peer)].append(i)
                messages.append(None)
            else:
                num_words = _message_words(own, self._direct.peers)
                messages.append(shared_W[offset : offset + num_words])
        for device, indices in own_by_device.items():
            most_words = max(self._buckets[i].bucket.num_words for i in indices)
            slots = [_allocate_words(most_words, device) for _ in indices[:NUM_SLOTS]]
            for turn, i in enumerate(indices):
                messages[i] = slots[turn % NUM_SLOTS][: self._buckets[i].bucket.num_words]
        return [words_W for words_W in messages if words_W is not None]

    def _bind(self, tensors: Mapping[str, Tensor]) -> "_Bound":
        """Return the buckets bound to views of `tensors`; the last two sets are reused."""
        addresses = [tensors[name].data_ptr() for name in self._tensor_names]
        for bound in self._bound:
            if bound.addresses == addresses:
                return bound
        with pause_collections():
            placed = [
                self._placed(own, message_W, tensors)
                for own, message_W in zip(self._buckets, self._messages_W, strict=True)
            ]
        number = self._bound[-1].number + 1 if self._bound else 0
        self._bound = [*self._bound[-1:], _Bound(number, addresses, placed)]
        return self._bound[-1]

    def _placed(
        self, own: RankBucket, message_W: Tensor, tensors: Mapping[str, Tensor]
    ) -> PlacedBucket:
        scratch_W = self._scratch_W[: own.bucket.num_words]
        if own.peer in self._direct.peers:
            return DirectBucket(own.bucket, scratch_W, own.held, tensors, message_W)
        # Packed and verified in the message if that is on this rank's device.
        words_W = message_W if message_W.device == scratch_W.device else scratch_W
        return PlacedBucket(own.bucket, words_W, own.held, tensors, message_W, self._sums)

    def _can_be_written(self, peer: int) -> bool:
        """Return whether `peer` can write all of its slices to where this rank holds them."""
        return all(can_be_written(o.bucket, o.held) for o in self._buckets if o.peer == peer)

    def _direct_of(self, bound: "_Bound") -> Iterator[tuple[int, DirectBucket]]:
        for own, placed in zip(self._buckets, bound.buckets, strict=True):
            if isinstance(placed, DirectBucket):
                yield own.peer, placed


@dataclass(frozen=True)
class _Bound:
    """The buckets bound to one set of tensors; sets are numbered as they come."""

    number: int
    addresses: list[int]
    buckets: list[PlacedBucket]


def _allocate_words(num_words: int, device: torch.device) -> Tensor:
    """Return int64 words of zeros. Raises TransferError if `device` has no memory for them."""
    try:
        with torch.inference_mode(False):
            return torch.zeros(num_words, dtype=torch.int64, device=device)
    except RuntimeError as error:
        num_mib = num_words * WORD_BYTES / 2**20
        raise TransferError(f"no memory for messages of {num_mib:.1f} MiB: {error}") from error


def _describe(version: int, placed: PlacedBucket) -> str:
    return f"version {version} {placed.bucket}"


def plan_slots(
    buckets: Sequence[RankBucket], direct: Collection[int] = ()
) -> tuple[list[int], dict[int, int]]:
    """Return the offset of each bucket in the memory shared with its peer, and peer -> size of that
    memory.

    Both are in int64 words. A peer has up to NUM_SLOTS slots of its largest bucket, used in turns.
    With a peer in `direct`, only headers and checksums are shared, and each bucket has a slot.
    """
    slot_words: dict[int, int] = defaultdict(int)
    for own in buckets:
        slot_words[own.peer] = max(slot_words[own.peer], _message_words(own, direct))
    num_seen: Counter[int] = Counter()
    offsets = []
    for own in buckets:
        slot = num_seen[own.peer]
        if own.peer not in direct:
            slot %= NUM_SLOTS
        offsets.append(slot * slot_words[own.peer])
        num_seen[own.peer] += 1
    shared_words = {}
    for peer, words in slot_words.items():
        num_slots = num_seen[peer] if peer in direct else min(NUM_SLOTS, num_seen[peer])
        shared_words[peer] = num_slots * words
    return offsets, shared_words


def _message_words(own: RankBucket, direct: Collection[int]) -> int:
    return direct_words(own.bucket) if own.peer in direct else own.bucket.num_words
