"""Moves one rank's buckets over one transport, from its own tensors to those of its peers.

    trainer ranks --- transfer ---> engine A, rank r --- transfer ---> engine B, rank r --- ...

Each rank works through its buckets in an order that is the same on both ends of each pair.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from mcore_rl.device.gpu_memory import DeviceStream
from mcore_rl.process.garbage import collections_paused
from mcore_rl.stream.buckets import Bucket
from mcore_rl.stream.link_end import LinkEnd
from mcore_rl.stream.placed_bucket import Holding, PlacedBucket
from mcore_rl.stream.routes.choice import MakeTransport
from mcore_rl.stream.routes.transport import TransferError
from mcore_rl.stream.verified_buckets import VerifiedBuckets

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
    peers together. A bucket whose message cannot lie on `end.device` is packed and verified in
    scratch memory there and takes one more copy.
    """

    def __init__(
        self,
        end: LinkEnd,
        buckets: Sequence[RankBucket],
        make_transport: MakeTransport,
        sums: str,
    ) -> None:
        """Connect to all peers; TransferError names one that is not there by end.deadline_s.

        All ranks pass the same kind of checksums, `sums`.
        """
        self.link = end.link
        self._name = end.name
        self._store = end.store
        self._buckets = buckets
        self._sums = sums
        offsets, shared_words = plan_slots(buckets)
        self._stream = DeviceStream(end.device)
        with torch.inference_mode(False), self._stream.running():
            self._transport = make_transport(end, shared_words, self._stream)
            self._messages_W = self._allocate_messages(offsets)
            elsewhere = [len(words) for words in self._messages_W if words.device != end.device]
            self._scratch_W = torch.zeros(
                max(elsewhere, default=0), dtype=torch.int64, device=end.device
            )
        tensor_names = (part.shard.tensor for own in buckets for part in own.held)
        self._tensor_names = list(dict.fromkeys(tensor_names))
        self._bound: list[tuple[list[int], list[PlacedBucket]]] = []
        """Addresses and buckets of the last two sets of tensors: an engine's two sets take turns.
        """

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
            for i, placed in enumerate(self._bind(tensors)):
                self._run(deadline_s, NUM_SLOTS - 1)
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
    ) -> None:
        """Receive, verify and place all slices; one bucket is placed while others travel.

        Buckets are added to `verified`, if given, once they are placed. Raises TransferError when
        time.monotonic() passes `deadline_s`, the link fails, or a checksum differs.
        """
        with self._failures_shared(), self._stream.running():
            buckets = self._bind(tensors)
            unstarted = iter(range(len(buckets)))
            self._start_recvs(version, buckets, islice(unstarted, NUM_SLOTS - 1))
            for i, placed in enumerate(buckets):
                self._start_recvs(version, buckets, islice(unstarted, 1))
                self._run(deadline_s, min(NUM_SLOTS, len(buckets) - i) - 1)
                placed.place(version)
                if verified is not None:
                    sums_P = placed.sums_P
                    self._stream.synchronize()
                    verified.add(sums_P)
            self._run(deadline_s)

    def take_saved(self) -> int:
        """Return the bytes that did not travel because they were as before, since the last call."""
        return self._transport.take_saved()

    def close(self) -> None:
        """Leave; peers that wait for this rank fail at once."""
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

    def _allocate_messages(self, offsets: Sequence[int]) -> list[Tensor]:
        """Return the int64 words in which each bucket travels, shared with its peer if possible."""
        messages: list[Tensor | None] = []
        own_by_device: dict[torch.device, list[int]] = defaultdict(list)
        for i, (own, offset) in enumerate(zip(self._buckets, offsets, strict=True)):
            shared_W = self._transport.memory(own.peer)
            if shared_W is None:
                own_by_device[self._transport.device(own.peer)].append(i)
                messages.append(None)
            else:
                messages.append(shared_W[offset : offset + own.bucket.num_words])
        for device, indices in own_by_device.items():
            most_words = max(self._buckets[i].bucket.num_words for i in indices)
            slots = [
                torch.zeros(most_words, dtype=torch.int64, device=device)
                for _ in indices[:NUM_SLOTS]
            ]
            for turn, i in enumerate(indices):
                messages[i] = slots[turn % NUM_SLOTS][: self._buckets[i].bucket.num_words]
        return [words_W for words_W in messages if words_W is not None]

    def _bind(self, tensors: Mapping[str, Tensor]) -> list[PlacedBucket]:
        """Return the buckets bound to views of `tensors`; the last two sets are reused."""
        addresses = [tensors[name].data_ptr() for name in self._tensor_names]
        for known, placed in self._bound:
            if known == addresses:
                return placed
        with collections_paused():
            placed = [
                PlacedBucket(
                    own.bucket, self._packed_in(message_W), own.held, tensors, message_W, self._sums
                )
                for own, message_W in zip(self._buckets, self._messages_W, strict=True)
            ]
        self._bound = [*self._bound[-1:], (addresses, placed)]
        return placed

    def _packed_in(self, message_W: Tensor) -> Tensor:
        """Return where to pack and verify: in the message if that is on this rank's device."""
        if message_W.device == self._scratch_W.device:
            return message_W
        return self._scratch_W[: len(message_W)]


def _describe(version: int, placed: PlacedBucket) -> str:
    return f"version {version} {placed.bucket}"


def plan_slots(buckets: Sequence[RankBucket]) -> tuple[list[int], dict[int, int]]:
    """Return the offset of each bucket in the memory shared with its peer, and peer -> size of that
    memory.

    Both are in int64 words. A peer has up to NUM_SLOTS slots of its largest bucket, used in turns.
    """
    slot_words: dict[int, int] = defaultdict(int)
    for own in buckets:
        slot_words[own.peer] = max(slot_words[own.peer], own.bucket.num_words)
    num_seen: Counter[int] = Counter()
    offsets = []
    for own in buckets:
        slot = num_seen[own.peer] % NUM_SLOTS
        offsets.append(slot * slot_words[own.peer])
        num_seen[own.peer] += 1
    shared_words = {
        peer: min(NUM_SLOTS, num_seen[peer]) * words for peer, words in slot_words.items()
    }
    return offsets, shared_words
