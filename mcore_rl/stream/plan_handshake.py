"""How the ranks of a link come to one plan: each knows both layouts, plans its own part, and pairs compare.

trainer rank: its shards -+                            +-> what I send, to whom  --+
                          +-> as recorded? else listed +                           +-> equal in every pair?
engine rank:  its trace  -+                            +-> what I get, from whom --+

Recorded layouts are a few numbers, which every rank checks against its own shards. If they are wrong for any
rank, all ranks list their shards for one another instead.
"""

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.slices.box import Shard
from mcore_rl.slices.layouts.layout import Layout, check_rank
from mcore_rl.slices.layouts.listed import ListedLayout
from mcore_rl.slices.layouts.recorded import RecordedLayouts, hf_tensors
from mcore_rl.slices.plan.local import plan_recvs, plan_sends
from mcore_rl.slices.plan.shared_region import Slice
from mcore_rl.slices.plan.shares import ListedHosts
from mcore_rl.stream.buckets import Bucket, plan_buckets
from mcore_rl.stream.link_store import LinkStore
from mcore_rl.stream.routes.channel import machine_id
from mcore_rl.stream.routes.transport import TransferError
from mcore_rl.stream.wire import Link, decode_shards, encode_shards

logger = logging.getLogger(__name__)

HfTensors = Mapping[str, tuple[tuple[int, ...], str]]
"""HF name -> shape, torch name of the dtype"""
MakeShards = Callable[[HfTensors], Sequence[Shard]]
"""A rank's own shards; an engine rank's come from the tensors that the trainer ranks hold."""


@dataclass(frozen=True)
class PlannedExchange:
    """What one rank needs to know.

    digest    "recorded" or "listed", and a sha256 of layouts and hosts: equal on all ranks, and on the ranks
              of two engines exactly if they get the same buckets
    shards    this rank's own, by HF name
    """

    digest: str
    buckets: list[Bucket]
    shards: Mapping[str, Sequence[Shard]]


@dataclass(frozen=True)
class _Found:
    """This rank's shards, the layouts of both sides, how they were found and their digest."""

    shards: Sequence[Shard]
    source: Layout
    target: Layout
    kind: str
    digest: str


class PlanHandshake:
    """One rank among all ranks of a link that come to agree."""

    def __init__(self, store: LinkStore, link: Link, rank: int, deadline_s: float) -> None:
        self._store, self._link, self._rank, self._deadline_s = store, link, rank, deadline_s
        self._is_sender = rank < link.num_senders
        self._side_rank = rank if self._is_sender else rank - link.num_senders

    def agree(self, make_shards: MakeShards) -> PlannedExchange:
        """TransferError names the ranks that did not come, failed or disagree."""
        found = self._find_recorded(make_shards) or self._find_listed(make_shards)
        own: dict[str, list[Shard]] = defaultdict(list)
        for shard in found.shards:
            own[shard.box.name].append(shard)
        hosts = self._find_hosts()
        flows = self._plan(found.source, found.target, hosts)
        buckets = plan_buckets(flows, self._link.num_receivers, self._link.bucket_bytes)
        layouts = hashlib.sha256(f"{found.digest} {hosts.sources} {_shared(hosts)}".encode())
        return PlannedExchange(f"{found.kind} {layouts.hexdigest()}", buckets, own)

    def _find_recorded(self, make_shards: MakeShards) -> _Found | None:
        """None if the recorded layouts are wrong for any rank, or cannot be made of its model and sizes."""
        if not self._link.layouts:
            return None
        with self._store.errors_published("layout check", self._rank):
            found = self._check_recorded(make_shards)
            self._store.publish(
                "layout check", self._rank, found.encode() if isinstance(found, str) else b""
            )
        problems = [
            data.decode() for data in self._collect("layout check", range(len(self._link.names)))
        ]
        wrong = [f"{n}: {p}" for n, p in zip(self._link.names, problems, strict=True) if p]
        if wrong:
            logger.warning(
                "shards are listed, as recorded layouts are wrong for %s", "; ".join(wrong)
            )
            return None
        assert not isinstance(found, str)
        return found

    def _check_recorded(self, make_shards: MakeShards) -> _Found | str:
        """What is recorded, or what is wrong with it for this rank."""
        recorded = RecordedLayouts.decode(self._link.layouts)
        try:
            source, target = recorded.source(), recorded.target()
        except ValueError as error:
            return str(error)
        shards = make_shards({} if self._is_sender else hf_tensors(source))
        try:
            check_rank(source if self._is_sender else target, self._side_rank, shards)
        except ValueError as error:
            return str(error)
        digest = hashlib.sha256(self._link.layouts.encode()).hexdigest()
        return _Found(shards, source, target, "recorded", digest)

    def _find_listed(self, make_shards: MakeShards) -> _Found:
        num_senders = self._link.num_senders
        with self._store.errors_published("layout", self._rank):
            sources = [] if self._is_sender else self._collect("layout", range(num_senders))
            held = ListedLayout([decode_shards(data) for data in sources])
            shards = make_shards(hf_tensors(held))
            self._store.publish("layout", self._rank, encode_shards(shards))
        encoded = self._collect("layout", range(len(self._link.names)))
        digest = hashlib.sha256(
            b"".join(hashlib.sha256(data).digest() for data in encoded)
        ).hexdigest()
        lists = [decode_shards(data) for data in encoded]
        source, target = ListedLayout(lists[:num_senders]), ListedLayout(lists[num_senders:])
        return _Found(shards, source, target, "listed", digest)

    def _plan(
        self, source: Layout, target: Layout, hosts: ListedHosts
    ) -> dict[tuple[int, int], Iterator[Slice]]:
        """(source rank, target rank) -> slices, of the pairs that this rank is part of."""
        num_senders = self._link.num_senders
        with self._store.errors_published("plan", self._rank):
            if self._is_sender:
                planned = plan_sends(self._rank, source, target, hosts)
                flows = {num_senders + flow.peer: flow for flow in planned}
            else:
                planned = plan_recvs(self._side_rank, source, target, hosts)
                flows = {flow.peer: flow for flow in planned}
            digests = {peer: flow.digest for peer, flow in flows.items()}
            self._store.publish("plan", self._rank, json.dumps(digests).encode())
        self._compare(digests)
        pairs = {tuple(sorted((self._rank, peer))): flow for peer, flow in flows.items()}
        return {
            (sender, receiver - num_senders): f.slices for (sender, receiver), f in pairs.items()
        }

    def _find_hosts(self) -> ListedHosts:
        """Ranks on one machine prefer one another."""
        self._store.publish("machine", self._rank, machine_id().encode())
        machines = self._collect("machine", range(len(self._link.names)))
        numbers = {machine: number for number, machine in enumerate(dict.fromkeys(machines))}
        hosts = tuple(numbers[machine] for machine in machines)
        return ListedHosts(hosts[: self._link.num_senders], hosts[self._link.num_senders :])

    def _compare(self, digests: Mapping[int, str]) -> None:
        peers, names = sorted(digests), self._link.names
        for peer, answer in zip(peers, self._collect("plan", peers), strict=True):
            theirs = json.loads(answer).get(str(self._rank))
            if theirs != digests[peer]:
                raise TransferError(
                    f"{names[self._rank]} and {names[peer]} planned otherwise: {digests[peer]}, {theirs}"
                )

    def _collect(self, what: str, ranks: Sequence[int]) -> list[bytes]:
        names = self._link.names
        return self._store.collect(what, ranks, names, names[self._rank], self._deadline_s)


def _shared(hosts: ListedHosts) -> list[int | None]:
    """By engine rank: its host, if a trainer rank runs on it."""
    return [host if host in hosts.sources else None for host in hosts.targets]
