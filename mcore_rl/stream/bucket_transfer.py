"""One rank's messages over one transport: buckets and tensors in, slices in the tensors of the peers out.

    trainer ranks --- passage ---> engine A, rank r --- passage ---> engine B, rank r --- ...

Every end works through its buckets in an order that is the same on both ends of each pair.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from threading import Condition

import torch
from torch import Tensor

from mcore_rl.device.gpu_memory import DeviceStream
from mcore_rl.stream.buckets import Bucket, Holding, PlacedBucket
from mcore_rl.stream.link_store import LinkStore
from mcore_rl.stream.routes.choice import MakeTransport
from mcore_rl.stream.routes.transport import TransferError
from mcore_rl.stream.wire import Link

NUM_SLOTS = 4
"""Buckets in flight, at most: between two ranks on one machine, of one rank between machines."""


class Arrivals:
    """The buckets of one version that are verified and placed, in order; who passes them on waits here."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._failure: str | None = None
        self._changed = Condition()

    def add(self, sums_P: Tensor) -> None:
        """The next bucket is there, with the sums that it came with."""
        with self._changed:
            self._sums.append(sums_P)
            self._changed.notify_all()

    def fail(self, failure: str) -> None:
        """No more will come."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def wait(self, index: int, deadline_s: float) -> Tensor:
        """The sums of bucket `index`, once it is there; TransferError if it does not come."""
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._sums) > index or self._failure,
                max(0.0, deadline_s - time.monotonic()),
            )
            if len(self._sums) > index:
                return self._sums[index]
        reason = self._failure or "the time is up"
        raise TransferError(f"bucket {index} cannot be passed on: {reason}", peer_lost=True)


class BucketTransfer:
    """The buckets of one rank, the memory they lie in, and the transport of their bytes.

    Memory: NUM_SLOTS buckets per pair of ranks that share memory, and as many per rank for all others. A
    bucket whose messages cannot lie on `device` is packed and verified there all the same, and copied once.
    """

    def __init__(
        self,
        store: LinkStore,
        link: Link,
        rank: int,
        buckets: Sequence[Bucket],
        peers: Sequence[int],
        held: Sequence[Sequence[Holding]],
        make_transport: MakeTransport,
        deadline_s: float,
        device: torch.device,
    ) -> None:
        """By bucket: `peers`, the rank at its other end; `held`, where it lies in this rank's tensors, which
        are on `device`.
        """
        self.link, self._store, self._name = link, store, link.names[rank]
        self._buckets, self._peers, self._held = buckets, peers, held
        starts, sizes = lay_out(buckets, peers)
        self._stream = DeviceStream(device)
        with torch.inference_mode(False), self._stream.running():
            self._transport = make_transport(store, rank, link, sizes, deadline_s, self._stream)
            self._places = self._find_places(starts)
            away = [len(place) for place in self._places if place.device != device]
            self._desk_W = torch.zeros(max(away, default=0), dtype=torch.int64, device=device)
        self._tensor_names = list({part.shard.tensor: None for parts in held for part in parts})
        self._bound: list[tuple[list[int], list[PlacedBucket]]] = []
        """Of the last two sets of tensors, by where they are: an engine's sets change places."""

    def send(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        deadline_s: float,
        arrivals: Arrivals | None = None,
    ) -> None:
        """Cast, checksum and send the slices; packs one bucket while others travel.

        With `arrivals`, each bucket goes on when it is there, with the sums it came with.
        """
        with self._failing_together(), self._stream.running():
            for i, (placed, peer) in enumerate(zip(self._bind(tensors), self._peers, strict=True)):
                self._run(deadline_s, NUM_SLOTS - 1)
                placed.pack(version, None if arrivals is None else arrivals.wait(i, deadline_s))
                self._transport.send(placed.message_u8, peer, f"version {version} {placed.bucket}")
            self._run(deadline_s)

    def receive(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        deadline_s: float,
        arrivals: Arrivals | None = None,
    ) -> None:
        """Receive, verify and place the slices; places one bucket while others travel."""
        with self._failing_together(), self._stream.running():
            buckets = self._bind(tensors)
            ahead = iter(zip(buckets, self._peers, strict=True))
            self._start_recvs(version, islice(ahead, NUM_SLOTS - 1))
            for i, placed in enumerate(buckets):
                self._start_recvs(version, islice(ahead, 1))
                self._run(deadline_s, min(NUM_SLOTS, len(buckets) - i) - 1)
                placed.verify(version)
                placed.place()
                if arrivals is not None:
                    sums_P = placed.sums_P
                    self._stream.synchronize()
                    arrivals.add(sums_P)
            self._run(deadline_s)

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
            own = f"{self._name}: {error}"
            first = self._store.fail(own)
            if first not in own:
                raise TransferError(f"{error}; before that, {first}", peer_lost=True) from error
            raise

    def _run(self, deadline_s: float, pending: int = 0) -> None:
        self._transport.run(deadline_s, self._store.failure, pending)

    def _start_recvs(self, version: int, due: Iterable[tuple[PlacedBucket, int]]) -> None:
        for placed, peer in due:
            self._transport.recv(placed.message_u8, peer, f"version {version} {placed.bucket}")

    def _find_places(self, starts: Sequence[int]) -> list[Tensor]:
        """int64 memory for each bucket: shared with the peer, or our own if bytes travel."""
        shared = [self._transport.memory(peer) for peer in self._peers]
        devices = [self._transport.device(peer) for peer in self._peers]
        far: dict[torch.device, list[int]] = defaultdict(list)
        for bucket, memory, device in zip(self._buckets, shared, devices, strict=True):
            if memory is None:
                far[device].append(bucket.num_words)
        slots = {
            device: cycle(
                [
                    torch.zeros(max(sizes), dtype=torch.int64, device=device)
                    for _ in sizes[:NUM_SLOTS]
                ]
            )
            for device, sizes in far.items()
        }
        return [
            next(slots[device])[: bucket.num_words]
            if memory is None
            else memory[start : start + bucket.num_words]
            for bucket, memory, device, start in zip(
                self._buckets, shared, devices, starts, strict=True
            )
        ]

    def _bind(self, tensors: Mapping[str, Tensor]) -> list[PlacedBucket]:
        """The buckets with views of `tensors`."""
        pointers = [tensors[name].data_ptr() for name in self._tensor_names]
        for known, placed in self._bound:
            if known == pointers:
                return placed
        placed = [
            PlacedBucket(bucket, self._words(place), held, tensors, place)
            for bucket, place, held in zip(self._buckets, self._places, self._held, strict=True)
        ]
        self._bound = [*self._bound[-1:], (pointers, placed)]
        return placed

    def _words(self, place: Tensor) -> Tensor:
        """Where the bucket that travels in `place` is packed or verified: there, if it is on our device."""
        return place if place.device == self._desk_W.device else self._desk_W[: len(place)]


def lay_out(buckets: Sequence[Bucket], peers: Sequence[int]) -> tuple[list[int], dict[int, int]]:
    """Where each bucket starts in the memory shared with its peer, and the size of that; int64 words.

    There are NUM_SLOTS slots per peer, taken in turns.
    """
    slot_words = dict.fromkeys(peers, 0)
    for bucket, peer in zip(buckets, peers, strict=True):
        slot_words[peer] = max(slot_words[peer], bucket.num_words)
    turns: Counter[int] = Counter()
    starts = []
    for peer in peers:
        starts.append(turns[peer] % NUM_SLOTS * slot_words[peer])
        turns[peer] += 1
    return starts, {peer: min(NUM_SLOTS, turns[peer]) * words for peer, words in slot_words.items()}
