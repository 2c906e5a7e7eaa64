"""Trainer ranks and the ranks of one engine meet, agree on a plan, and then move one version after another.

trainer rank: publish layout -+
                              +-> everyone reads all layouts -> plan -> compare digests -> buckets
engine rank:  trace, publish -+
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from mcore_rl.slices.box import Shard
from mcore_rl.slices.plan import make_plan
from mcore_rl.stream.buckets import Bucket, Packer, message, plan_buckets
from mcore_rl.stream.store import LinkStore
from mcore_rl.stream.transport import GlooTransport, TransferError, Transport, route_to
from mcore_rl.stream.wire import Link, Report, decode_shards, encode_shards

SENDER_GRACE_S = 2.0
"""How much longer than the engine's ranks a sender waits: a receiver knows which sender it waits for, while
to the other senders the receiver itself seems to be late.
"""

MakeTransport = Callable[[LinkStore, int, Link], Transport]
Layouts = Sequence[tuple[Shard, ...]]


def gloo_transport(store: LinkStore, rank: int, link: Link) -> Transport:
    local_host = route_to(link.store_host, link.store_port)
    return GlooTransport(store.tcp_store, rank, link.names, local_host, link.timeout_s)


class Connection:
    """One rank's end of a link: its buckets, two buffers for them, and the transport of its bytes."""

    def __init__(
        self,
        store: LinkStore,
        link: Link,
        rank: int,
        make_shards: Callable[[Layouts], Sequence[Shard]],
        make_transport: MakeTransport = gloo_transport,
    ) -> None:
        """Meet the others and agree with all of them on the plan, within link.timeout_s.

        `make_shards` gives this rank's own layout; an engine rank's gets the layouts of the trainer ranks, a
        trainer rank's gets none. TransferError names the ranks that did not come, failed or disagree.
        """
        self._store, self._link, self._rank = store, link, rank
        deadline_s = time.monotonic() + link.timeout_s
        layouts = self._exchange_layouts(store, make_shards, deadline_s)
        self.digest, self._buckets = self._agree(store, layouts, deadline_s)
        self.num_bytes = sum(bucket.num_bytes for bucket in self._buckets)
        self._packer = Packer(self._buckets)
        self._buffers = [self._packer.make_buffer() for _ in self._buckets[:2]]
        self._transport = make_transport(store, rank, link)

    @property
    def name(self) -> str:
        return self._link.names[self._rank]

    def send(self, version: int, tensors: Mapping[str, Tensor], timeout_s: float) -> Report:
        """Cast, checksum and send this trainer rank's slices; packs one bucket while the last one travels."""
        began_s = time.monotonic()
        deadline_s = began_s + timeout_s + SENDER_GRACE_S
        with self._failing_together():
            for i, bucket in enumerate(self._buckets):
                packed_u8 = self._packer.pack(bucket, version, tensors, self._buffers[i % 2])
                self._run(deadline_s)
                peer = self._link.num_senders + bucket.target_rank
                self._transport.send(packed_u8, peer, f"version {version} {bucket}")
            self._run(deadline_s)
        return self._report(began_s)

    def receive(self, version: int, tensors: Mapping[str, Tensor], timeout_s: float) -> Report:
        """Receive, verify and place this engine rank's slices; places one bucket while the next travels."""
        began_s = time.monotonic()
        with self._failing_together():
            for i, bucket in enumerate(self._buckets):
                if i == 0:
                    self._start_recv(version, i)
                self._run(began_s + timeout_s)
                if i + 1 < len(self._buckets):
                    self._start_recv(version, i + 1)
                self._packer.unpack(bucket, version, tensors, self._buffers[i % 2])
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

    def _start_recv(self, version: int, i: int) -> None:
        bucket = self._buckets[i]
        buffer_u8 = message(bucket, self._buffers[i % 2])
        self._transport.recv(buffer_u8, bucket.source_rank, f"version {version} {bucket}")

    def _report(self, began_s: float) -> Report:
        seconds = time.monotonic() - began_s
        return Report(self.name, self.digest, self.num_bytes, len(self._buckets), seconds)

    def _exchange_layouts(
        self, store: LinkStore, make_shards: Callable[[Layouts], Sequence[Shard]], deadline_s: float
    ) -> Layouts:
        senders = range(self._link.num_senders)
        names = self._link.names
        with store.errors_published("layout", self._rank):
            is_sender = self._rank in senders
            sources = [] if is_sender else store.collect("layout", senders, names, self.name, deadline_s)
            own = make_shards([decode_shards(data) for data in sources])
            store.publish("layout", self._rank, encode_shards(own))
        layouts = store.collect("layout", range(len(names)), names, self.name, deadline_s)
        return [decode_shards(data) for data in layouts]

    def _agree(self, store: LinkStore, layouts: Layouts, deadline_s: float) -> tuple[str, list[Bucket]]:
        num_senders, names = self._link.num_senders, self._link.names
        with store.errors_published("digest", self._rank):
            plan = make_plan(layouts[:num_senders], layouts[num_senders:])
            store.publish("digest", self._rank, plan.digest.encode())
        digests = store.collect("digest", range(len(names)), names, self.name, deadline_s)
        others = [name for name, d in zip(names, digests, strict=True) if d.decode() != plan.digest]
        if others:
            raise TransferError(f"{self.name} planned {plan.digest}, but {', '.join(others)} otherwise")
        is_sender = self._rank < num_senders
        own = plan.sends(self._rank) if is_sender else plan.recvs(self._rank - num_senders)
        return plan.digest, plan_buckets(own, self._link.num_receivers, self._link.bucket_bytes)
