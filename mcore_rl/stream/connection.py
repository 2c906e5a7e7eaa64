"""Trainer ranks and the ranks of one engine meet, agree on a plan, and move one version after another."""

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from mcore_rl.stream.agreement import MakeShards, agree
from mcore_rl.stream.buckets import Bucket, PlacedBucket, holdings
from mcore_rl.stream.routes import MakeTransport, make_routes
from mcore_rl.stream.store import LinkStore
from mcore_rl.stream.transport import TransferError
from mcore_rl.stream.wire import Link, Report

SENDER_GRACE_S = 2.0
"""How much longer than the engine's ranks a sender waits: a receiver knows which sender it waits for, while
to the other senders the receiver itself seems to be late.
"""

_SWAP_THREADS = 4
"""Copies at once, if the rank has as many cores: generation waits for them."""


class Connection:
    """One rank's end of a link: its buckets, the memory they lie in, and the transport of their bytes.

    Memory: of a staged link, all of the receiver's slices, which shared memory gives both ends; else two
    buckets per rank, or per pair of ranks on one machine.
    """

    def __init__(
        self,
        store: LinkStore,
        link: Link,
        rank: int,
        make_shards: MakeShards,
        make_transport: MakeTransport = make_routes,
    ) -> None:
        """Meet the others and agree on the plan, within link.timeout_s; TransferError as of `agree`."""
        self._store, self._link, self._rank = store, link, rank
        self._is_sender = rank < link.num_senders
        deadline_s = time.monotonic() + link.timeout_s
        agreed = agree(store, link, rank, make_shards, deadline_s)
        self.digest, self._buckets = agreed.digest, agreed.buckets
        self.num_bytes = sum(bucket.num_bytes for bucket in self._buckets)
        starts, sizes = lay_out(self._buckets, [self._peer(b) for b in self._buckets], staged=link.staged)
        self._transport = make_transport(store, rank, link, sizes, deadline_s)
        self._places = self._find_places(starts)
        self._held = [holdings(bucket, agreed.shards) for bucket in self._buckets]
        self._names = list({part.shard.tensor: None for held in self._held for part in held})
        self._bound: tuple[list[int], list[PlacedBucket]] = ([], [])

    @property
    def name(self) -> str:
        return self._link.names[self._rank]

    def send(self, version: int, tensors: Mapping[str, Tensor], timeout_s: float) -> Report:
        """Cast, checksum and send this trainer rank's slices; packs one bucket while the last one travels."""
        began_s = time.monotonic()
        deadline_s = began_s + timeout_s + SENDER_GRACE_S
        with self._failing_together():
            for placed in self._bind(tensors):
                placed.pack(version)
                if not self._all_staged:
                    self._run(deadline_s)
                what = f"version {version} {placed.bucket}"
                self._transport.send(placed.message_u8, self._peer(placed.bucket), what)
            self._run(deadline_s)
        return self._report(began_s)

    def receive(self, version: int, tensors: Mapping[str, Tensor], timeout_s: float) -> Report:
        """Receive and verify this engine rank's slices; unless the link is staged, place each bucket too,
        while the next one travels.
        """
        began_s = time.monotonic()
        deadline_s = began_s + timeout_s
        buckets = self._bind(tensors)
        with self._failing_together():
            for placed, following in zip(buckets, [*buckets[1:], None], strict=True):
                if placed is buckets[0]:
                    self._start_recv(version, placed)
                self._run(deadline_s)
                if following is not None:
                    self._start_recv(version, following)
                placed.verify(version)
                if not self._link.staged:
                    placed.place()
            self._run(deadline_s)
        return self._report(began_s)

    def swap(self, version: int, tensors: Mapping[str, Tensor]) -> Report:
        """Place what `receive` staged of `version`."""
        began_s = time.monotonic()
        buckets = self._bind(tensors)
        for placed in buckets:
            placed.check_version(version)
        with ThreadPoolExecutor(min(_SWAP_THREADS, len(os.sched_getaffinity(0)))) as threads:
            list(threads.map(PlacedBucket.place, buckets))
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

    def _run(self, deadline_s: float) -> None:
        self._transport.run(deadline_s, self._store.failure)

    def _start_recv(self, version: int, placed: PlacedBucket) -> None:
        what = f"version {version} {placed.bucket}"
        self._transport.recv(placed.message_u8, placed.bucket.source_rank, what)

    def _peer(self, bucket: Bucket) -> int:
        """The rank at the other end."""
        return self._link.num_senders + bucket.target_rank if self._is_sender else bucket.source_rank

    def _find_places(self, starts: Sequence[int]) -> list[Tensor]:
        """int64 memory for each bucket: shared with the peer, or our own if bytes travel."""
        shared = [self._transport.memory(self._peer(bucket)) for bucket in self._buckets]
        self._all_staged = self._link.staged and all(memory is not None for memory in shared)
        own = [
            bucket.num_words for bucket, memory in zip(self._buckets, shared, strict=True) if memory is None
        ]
        keeps_all = self._link.staged and not self._is_sender
        slots = [torch.zeros(max(own, default=0), dtype=torch.int64) for _ in own[:2]]
        places = []
        for i, (bucket, memory, start) in enumerate(zip(self._buckets, shared, starts, strict=True)):
            if memory is not None:
                places.append(memory[start : start + bucket.num_words])
            elif keeps_all:
                places.append(torch.zeros(bucket.num_words, dtype=torch.int64))
            else:
                places.append(slots[i % 2][: bucket.num_words])
        return places

    def _bind(self, tensors: Mapping[str, Tensor]) -> list[PlacedBucket]:
        """The buckets with views of `tensors`, made anew when these have moved."""
        pointers = [tensors[name].data_ptr() for name in self._names]
        if pointers != self._bound[0] or not self._bound[1]:
            placed = [
                PlacedBucket(bucket, place, held, tensors)
                for bucket, place, held in zip(self._buckets, self._places, self._held, strict=True)
            ]
            self._bound = (pointers, placed)
        return self._bound[1]

    def _report(self, began_s: float) -> Report:
        seconds = time.monotonic() - began_s
        return Report(self.name, self.digest, self.num_bytes, len(self._buckets), seconds)


def lay_out(
    buckets: Sequence[Bucket], peers: Sequence[int], *, staged: bool
) -> tuple[list[int], dict[int, int]]:
    """Where each bucket starts in the memory shared with its peer, and the size of that; int64 words.

    Staged, all buckets lie one after another; else there are two slots per peer, taken in turns.
    """
    sizes: dict[int, int] = defaultdict(int)
    starts = []
    slot_words = dict.fromkeys(peers, 0)
    for bucket, peer in zip(buckets, peers, strict=True):
        slot_words[peer] = max(slot_words[peer], bucket.num_words)
    for bucket, peer in zip(buckets, peers, strict=True):
        start = sizes[peer] if staged else bucket.index % 2 * slot_words[peer]
        starts.append(start)
        sizes[peer] = max(sizes[peer], start + bucket.num_words)
    return starts, dict(sizes)
