"""Executes a rank's plan: moves one version after another over one transport.

    trainer ranks --- execute ---> engine A, rank r --- execute ---> engine B, rank r --- ...

Each rank works through its buckets in an order that is the same on both ends of each pair. The
transport is selected once, in transports/select.py; this module does not depend on the choice.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from threading import Condition

import torch
from torch import Tensor

from mcore_rl.device.gpu_memory import DeviceStream
from mcore_rl.process.gc_pause import pause_collections
from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.placed_bucket import BucketEnd
from mcore_rl.weight_sync.plan_handshake import MakeShards, PlanHandshake, RankPlan
from mcore_rl.weight_sync.transports.select import MakeTransport
from mcore_rl.weight_sync.transports.transport import NUM_SLOTS
from mcore_rl.weight_sync.verify import WORD_BYTES
from mcore_rl.weight_sync.waits import TransferError
from mcore_rl.weight_sync.wire import Report


class VerifiedBuckets:
    """Hands the verified buckets of one version, in order, from a relay's receiving thread to its
    forwarding thread.
    """

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._failure: str | None = None
        self._changed = Condition()

    def add(self, sums_P: Tensor) -> None:
        """Add the next bucket's checksums, which its sender took."""
        with self._changed:
            self._sums.append(sums_P)
            self._changed.notify_all()

    def fail(self, failure: str) -> None:
        """Announce that no bucket follows, because of `failure`."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def wait(self, index: int, deadline_s: float) -> Tensor:
        """Return the checksums of bucket `index` once the bucket is verified.

        Raises TransferError after `fail`, or when time.monotonic() passes `deadline_s`.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._sums) > index or self._failure,
                max(0.0, deadline_s - time.monotonic()),
            )
            if len(self._sums) > index:
                return self._sums[index]
        reason = self._failure or "the time is up"
        raise TransferError(f"bucket {index} cannot be forwarded: {reason}", peer_lost=True)


@dataclass(frozen=True)
class _Bound:
    """The buckets bound to one set of tensors; sets are numbered by their first use."""

    number: int
    tensors: Mapping[str, Tensor]
    addresses: list[int]
    buckets: list[BucketEnd]


class PlanExecutor:
    """One rank's buckets, the memory of their messages, and the transport that moves them.

    Memory: NUM_SLOTS buckets for each peer that shares memory with this rank, NUM_SLOTS for all
    other peers together, and one bucket for all peers with direct writes. Memory that is not shared
    is allocated for the first version, which may never come over this link. A bucket whose message
    cannot lie on `end.device` is packed and verified in scratch memory there and takes one more
    copy.
    """

    def __init__(self, end: LinkEnd, plan: RankPlan, make_transport: MakeTransport) -> None:
        """Connect to all peers; TransferError names a peer that is missing at end.deadline_s."""
        self.end = end
        self.plan = plan
        self.make_transport = make_transport
        self._buckets = plan.buckets
        self._device = end.device
        self._stream = DeviceStream(end.device)
        with torch.inference_mode(False), self._stream.running():
            self._transport = make_transport(end, plan, self._stream)
        tensor_names = (part.shard.tensor for own in plan.buckets for part in own.held)
        self._tensor_names = list(dict.fromkeys(tensor_names))
        self._bound: list[_Bound] = []
        """The last two sets of tensors: an engine's two sets take turns."""

    @staticmethod
    def open(end: LinkEnd, plan: RankPlan, make_transport: MakeTransport) -> "PlanExecutor":
        """Connect to the peers of the agreed `plan`; mark the link as failed if that fails.

        Raises TransferError, which names a rank that does not connect by end.deadline_s.
        """
        try:
            with pause_collections():
                return PlanExecutor(end, plan, make_transport)
        except Exception as error:
            end.store.fail(f"{end.name}: {error}")  # No rank waits for this one any longer.
            raise

    @staticmethod
    def meet(
        end: LinkEnd, make_shards: MakeShards, make_transport: MakeTransport
    ) -> "PlanExecutor":
        """Meet the other ranks at the link's store, agree on the plan, and connect.

        Raises TransferError, which names a rank that is late, failed or disagrees.
        """
        handshake = PlanHandshake(end, make_shards)
        with pause_collections():
            plan = handshake.run()
        return PlanExecutor.open(handshake.end, plan, make_transport)

    @property
    def num_bytes(self) -> int:
        """Bytes of weights in each version."""
        return sum(own.bucket.num_bytes for own in self._buckets)

    def execute(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        deadline_s: float,
        verified: VerifiedBuckets | None = None,
    ) -> list[Tensor]:
        """Send all slices of `tensors` as `version`, or receive them into `tensors`.

        Returns the sender's checksums of each received bucket, int64 [slices]. Raises TransferError
        when time.monotonic() passes `deadline_s`, when the link fails, or if a checksum differs.

        verified  of a relay: its receiving end adds each bucket once the bucket is placed, and its
                  sending end forwards the bucket with these checksums
        """
        with self._share_failures(), self._stream.running():
            bound = self._bind(tensors)
            peers = (own.peer for own in self._buckets)
            carried = list(zip(peers, bound.buckets, strict=True))
            failure = self.end.store.failure
            self._transport.begin(version, bound.number, carried, deadline_s, failure)
            if self.end.is_sender:
                self._pack_all(version, bound.buckets, deadline_s, verified)
                sums = []
            else:
                sums = self._place_all(version, bound.buckets, deadline_s, verified)
            self._run(deadline_s)
        return sums

    def make_report(self, began_s: float) -> Report:
        """Return the report of a version whose transfer began at time.monotonic() `began_s`."""
        seconds = time.monotonic() - began_s
        saved = self._transport.take_saved()
        num_buckets = len(self._buckets)
        digest = self.plan.digest
        return Report(self.end.name, digest, self.num_bytes, num_buckets, seconds, saved)

    def take_saved(self) -> int:
        """Return the bytes since the last call that did not travel, because they were as before."""
        return self._transport.take_saved()

    def close(self) -> None:
        """Leave the link; peers that wait for this rank fail at once."""
        self._transport.close()

    def _pack_all(
        self,
        version: int,
        buckets: Sequence[BucketEnd],
        deadline_s: float,
        verified: VerifiedBuckets | None,
    ) -> None:
        """Cast, checksum and send all slices; one bucket is packed while others travel."""
        for i, placed in enumerate(buckets):
            self._run(deadline_s, self._transport.num_ahead)
            sums_P = None if verified is None else verified.wait(i, deadline_s)
            placed.pack(version, sums_P)
            peer = self._buckets[i].peer
            what = _describe(version, placed)
            self._transport.send(placed.message_u8, peer, what, placed.bucket.index)

    def _place_all(
        self,
        version: int,
        buckets: Sequence[BucketEnd],
        deadline_s: float,
        verified: VerifiedBuckets | None,
    ) -> list[Tensor]:
        """Receive, verify and place all slices; one bucket is placed while others travel."""
        sums: list[Tensor] = []
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
        return sums

    @contextmanager
    def _share_failures(self) -> Iterator[None]:
        """Report an error in the block to the other ranks of the link, which then stop waiting."""
        try:
            yield
        except Exception as error:
            own = f"{self.end.name}: {error}"
            first = self.end.store.fail(own)
            if first not in own:
                raise TransferError(f"{error}; before that, {first}", peer_lost=True) from error
            raise

    def _run(self, deadline_s: float, pending: int = 0) -> None:
        self._transport.run(deadline_s, self.end.store.failure, pending)

    def _start_recvs(
        self, version: int, buckets: Sequence[BucketEnd], indices: Iterable[int]
    ) -> None:
        for i in indices:
            peer = self._buckets[i].peer
            what = _describe(version, buckets[i])
            self._transport.recv(buckets[i].message_u8, peer, what, buckets[i].bucket.index)

    @cached_property
    def _scratch_W(self) -> Tensor:
        """Int64 words for the largest bucket that is packed and verified outside of its message."""
        elsewhere = [
            own.bucket.num_words
            for own, words_W in zip(self._buckets, self._messages_W, strict=True)
            if (len(words_W) < own.bucket.num_words or words_W.device != self._device)
            and self._transport.needs_scratch(own.peer)
        ]
        return _allocate_words(max(elsewhere, default=0), self._device)

    @cached_property
    def _messages_W(self) -> list[Tensor]:
        """The int64 words of each bucket's message, shared with the peer if possible."""
        messages: list[Tensor | None] = []
        own_by_device: dict[torch.device, list[int]] = defaultdict(list)
        for i, own in enumerate(self._buckets):
            messages.append(self._transport.message(i, own.peer))
            if messages[i] is None:
                own_by_device[self._transport.device(own.peer)].append(i)
        for device, indices in own_by_device.items():
            most_words = max(self._buckets[i].bucket.num_words for i in indices)
            slots = [_allocate_words(most_words, device) for _ in indices[:NUM_SLOTS]]
            for turn, i in enumerate(indices):
                messages[i] = slots[turn % NUM_SLOTS][: self._buckets[i].bucket.num_words]
        return [words_W for words_W in messages if words_W is not None]

    def _bind(self, tensors: Mapping[str, Tensor]) -> _Bound:
        """Return the buckets bound to views of `tensors`; the last two sets are reused."""
        addresses = [tensors[name].data_ptr() for name in self._tensor_names]
        for bound in self._bound:
            has_moved = bound.tensors is tensors and self._transport.moves_with_storages
            if bound.addresses == addresses or has_moved:
                return bound
        with pause_collections():
            sums = self.plan.sums
            placed = [
                self._transport.bind(own, tensors, message_W, self._scratch_W, sums)
                for own, message_W in zip(self._buckets, self._messages_W, strict=True)
            ]
        number = self._bound[-1].number + 1 if self._bound else 0
        self._bound = [*self._bound[-1:], _Bound(number, tensors, addresses, placed)]
        return self._bound[-1]


def _allocate_words(num_words: int, device: torch.device) -> Tensor:
    """Return int64 words of zeros. Raises TransferError if `device` has no memory for them."""
    try:
        with torch.inference_mode(False):
            return torch.zeros(num_words, dtype=torch.int64, device=device)
    except RuntimeError as error:
        num_mib = num_words * WORD_BYTES / 2**20
        raise TransferError(f"no memory for messages of {num_mib:.1f} MiB: {error}") from error


def _describe(version: int, placed: BucketEnd) -> str:
    return f"version {version} {placed.bucket}"
