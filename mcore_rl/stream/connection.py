"""Trainer ranks and the ranks of one engine meet, agree on a plan, and move one version after another."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle

import torch
from torch import Tensor

from mcore_rl.stream.agreement import MakeShards, Meeting
from mcore_rl.stream.buckets import Bucket, PlacedBucket, holdings
from mcore_rl.stream.routes import MakeTransport, make_routes
from mcore_rl.stream.store import LinkStore
from mcore_rl.stream.transport import TransferError
from mcore_rl.stream.wire import Link, Report

SENDER_GRACE_S = 2.0
"""How much longer than the engine's ranks a sender waits: a receiver knows which sender it waits for, while
to the other senders the receiver itself seems to be late.
"""

NUM_SLOTS = 4
"""Buckets in flight, at most: between two ranks on one machine, of one rank between machines."""


class Connection:
    """One rank's end of a link: its buckets, the memory they lie in, and the transport of their bytes.

    Memory: NUM_SLOTS buckets per pair of ranks on one machine, and as many per rank for other machines.
    """

    def __init__(
        self,
        store: LinkStore,
        link: Link,
        rank: int,
        make_shards: MakeShards,
        make_transport: MakeTransport = make_routes,
    ) -> None:
        """Meet the others and agree on the plan, within link.timeout_s; TransferError as of Meeting."""
        self._store, self._link, self._rank = store, link, rank
        self._is_sender = rank < link.num_senders
        deadline_s = time.monotonic() + link.timeout_s
        agreed = Meeting(store, link, rank, deadline_s).agree(make_shards)
        self.digest, self._buckets = agreed.digest, agreed.buckets
        self.num_bytes = sum(bucket.num_bytes for bucket in self._buckets)
        starts, sizes = lay_out(self._buckets, [self._peer(b) for b in self._buckets])
        self._transport = make_transport(store, rank, link, sizes, deadline_s)
        self._places = self._find_places(starts)
        self._held = [holdings(bucket, agreed.shards) for bucket in self._buckets]
        self._names = list({part.shard.tensor: None for held in self._held for part in held})
        self._bound: list[tuple[list[int], list[PlacedBucket]]] = []
        """Of the last two sets of tensors, by where they are: an engine's sets change places."""

    @property
    def name(self) -> str:
        return self._link.names[self._rank]

    def send(self, version: int, tensors: Mapping[str, Tensor], timeout_s: float) -> Report:
        """Cast, checksum and send this trainer rank's slices; packs one bucket while others travel."""
        began_s = time.monotonic()
        deadline_s = began_s + timeout_s + SENDER_GRACE_S
        with self._failing_together():
            for placed in self._bind(tensors):
                self._run(deadline_s, NUM_SLOTS - 1)
                placed.pack(version)
                what = f"version {version} {placed.bucket}"
                self._transport.send(placed.message_u8, self._peer(placed.bucket), what)
            self._run(deadline_s)
        return self._report(began_s)

    def receive(self, version: int, tensors: Mapping[str, Tensor], timeout_s: float) -> Report:
        """Receive, verify and place this engine rank's slices; places one bucket while others travel."""
        began_s = time.monotonic()
        deadline_s = began_s + timeout_s
        buckets = self._bind(tensors)
        with self._failing_together():
            for placed in buckets[: NUM_SLOTS - 1]:
                self._start_recv(version, placed)
            for i, placed in enumerate(buckets):
                if i + NUM_SLOTS - 1 < len(buckets):
                    self._start_recv(version, buckets[i + NUM_SLOTS - 1])
                self._run(deadline_s, min(NUM_SLOTS, len(buckets) - i) - 1)
                placed.verify(version)
                placed.place()
            self._run(deadline_s)
        return self._report(began_s)

    def close(self) -> None:
        """Leave; peers that wait for this rank fail at once."""
        self._transport.close()

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Tell the other ranks of the link of a failure here; each of them stops waiting when it hears of
        it.
        """
        try:
            yield
        except Exception as error:
            own = f"{self.name}: {error}"
            first = self._store.fail(own)
            if first not in own:
                raise TransferError(f"{error}; before that, {first}", peer_lost=True) from error
            raise

    def _run(self, deadline_s: float, pending: int = 0) -> None:
        self._transport.run(deadline_s, self._store.failure, pending)

    def _start_recv(self, version: int, placed: PlacedBucket) -> None:
        what = f"version {version} {placed.bucket}"
        self._transport.recv(placed.message_u8, placed.bucket.source_rank, what)

    def _peer(self, bucket: Bucket) -> int:
        """The rank at the other end."""
        return self._link.num_senders + bucket.target_rank if self._is_sender else bucket.source_rank

    def _find_places(self, starts: Sequence[int]) -> list[Tensor]:
        """int64 memory for each bucket: shared with the peer, or our own if bytes travel."""
        shared = [self._transport.memory(self._peer(bucket)) for bucket in self._buckets]
        far = [
            bucket.num_words for bucket, memory in zip(self._buckets, shared, strict=True) if memory is None
        ]
        slots = cycle([torch.zeros(max(far), dtype=torch.int64) for _ in far[:NUM_SLOTS]])
        return [
            next(slots)[: bucket.num_words] if memory is None else memory[start : start + bucket.num_words]
            for bucket, memory, start in zip(self._buckets, shared, starts, strict=True)
        ]

    def _bind(self, tensors: Mapping[str, Tensor]) -> list[PlacedBucket]:
        """The buckets with views of `tensors`."""
        pointers = [tensors[name].data_ptr() for name in self._names]
        for known, placed in self._bound:
            if known == pointers:
                return placed
        placed = [
            PlacedBucket(bucket, place, held, tensors)
            for bucket, place, held in zip(self._buckets, self._places, self._held, strict=True)
        ]
        self._bound = [*self._bound[-1:], (pointers, placed)]
        return placed

    def _report(self, began_s: float) -> Report:
        seconds = time.monotonic() - began_s
        return Report(self.name, self.digest, self.num_bytes, len(self._buckets), seconds)


def lay_out(buckets: Sequence[Bucket], peers: Sequence[int]) -> tuple[list[int], dict[int, int]]:
    """Where each bucket starts in the memory shared with its peer, and the size of that; int64 words.

    There are NUM_SLOTS slots per peer, taken in turns.
    """
    slot_words = dict.fromkeys(peers, 0)
    num_buckets = Counter(peers)
    for bucket, peer in zip(buckets, peers, strict=True):
        slot_words[peer] = max(slot_words[peer], bucket.num_words)
    starts = [b.index % NUM_SLOTS * slot_words[peer] for b, peer in zip(buckets, peers, strict=True)]
    return starts, {peer: min(NUM_SLOTS, num_buckets[peer]) * words for peer, words in slot_words.items()}
