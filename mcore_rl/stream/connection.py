"""Trainer ranks and the ranks of one engine meet, agree on a plan, and move one version after another."""

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from mcore_rl.stream.bucket_transfer import Arrivals, BucketTransfer
from mcore_rl.stream.buckets import holdings
from mcore_rl.stream.link_store import LinkStore
from mcore_rl.stream.plan_handshake import MakeShards, PlanHandshake
from mcore_rl.stream.routes.choice import MakeTransport
from mcore_rl.stream.wire import Link, Report

SENDER_GRACE_S = 2.0
"""How much longer than the engine's ranks a sender waits: a receiver knows which sender it waits for, while
to the other senders the receiver itself seems to be late.
"""


class Connection:
    """One rank's end of a link, and of the links by which engines with equal layouts pass slices on."""

    def __init__(
        self,
        store: LinkStore,
        link: Link,
        rank: int,
        make_shards: MakeShards,
        make_transport: MakeTransport,
        device: torch.device,
    ) -> None:
        """Meet the others and agree on the plan, within link.timeout_s; TransferError as of PlanHandshake.

        `device`: where this rank's tensors are.
        """
        self._device = device
        self._link, self._rank, self._make_transport = link, rank, make_transport
        deadline_s = time.monotonic() + link.timeout_s
        agreed = PlanHandshake(store, link, rank, deadline_s).agree(make_shards)
        self.digest, self._buckets = agreed.digest, agreed.buckets
        self.num_bytes = sum(bucket.num_bytes for bucket in self._buckets)
        self._held = [holdings(bucket, agreed.shards) for bucket in self._buckets]
        if rank < link.num_senders:
            peers = [link.num_senders + bucket.target_rank for bucket in self._buckets]
        else:
            peers = [bucket.source_rank for bucket in self._buckets]
        self._passage = BucketTransfer(
            store, link, rank, self._buckets, peers, self._held, make_transport, deadline_s, device
        )

    @property
    def name(self) -> str:
        return self._link.names[self._rank]

    def send(self, version: int, tensors: Mapping[str, Tensor], timeout_s: float) -> Report:
        """Send this trainer rank's slices."""
        began_s = time.monotonic()
        self._passage.send(version, tensors, began_s + timeout_s + SENDER_GRACE_S)
        return self._report(began_s)

    def receive(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        timeout_s: float,
        upstream: BucketTransfer | None = None,
        arrivals: Arrivals | None = None,
    ) -> Report:
        """Receive this engine rank's slices from the trainer ranks, or from an engine `upstream`."""
        began_s = time.monotonic()
        (upstream or self._passage).receive(version, tensors, began_s + timeout_s, arrivals)
        return self._report(began_s)

    def open_passage(self, link: Link) -> BucketTransfer:
        """To or from the same rank of another engine with equal layouts; TransferError if it does not come.

        What travels there is what this rank gets over its own link.
        """
        own = self._rank - self._link.num_senders
        is_upstream = link.engine == self._link.engine
        rank, peer = (link.num_senders + own, own) if is_upstream else (own, link.num_senders + own)
        deadline_s = time.monotonic() + link.timeout_s
        peers = [peer] * len(self._buckets)
        store = LinkStore.open(link)
        make_transport, device = self._make_transport, self._device
        return BucketTransfer(
            store, link, rank, self._buckets, peers, self._held, make_transport, deadline_s, device
        )

    def close(self) -> None:
        """Leave; peers that wait for this rank fail at once."""
        self._passage.close()

    def _report(self, began_s: float) -> Report:
        seconds = time.monotonic() - began_s
        return Report(self.name, self.digest, self.num_bytes, len(self._buckets), seconds)
