"""Computes a rank's part of the plan; links of equal layouts, hosts and checksums share it."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mcore_rl.weight_sync.bucket_transfer import RankBucket
from mcore_rl.weight_sync.buckets import Bucket, plan_buckets
from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.link_keeper import PlanAnswer
from mcore_rl.weight_sync.placed_bucket import holdings
from mcore_rl.weight_sync.roster import Roster
from mcore_rl.weight_sync.verify import XXH3
from mcore_rl.weights.box import Shard
from mcore_rl.weights.layouts.layout import Layout
from mcore_rl.weights.plan.local import Flow, plan_recvs, plan_sends


@dataclass(frozen=True)
class Layouts:
    """A rank's shards and the layouts of both sides.

    kind  how the layouts were found: "recorded" or "listed"
    """

    shards: Sequence[Shard]
    source: Layout
    target: Layout
    kind: str
    digest: str


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of the plan.

    digest   "recorded" or "listed", then a sha256 of layouts, hosts and the kind of checksums:
             equal on all ranks of a link, and on the ranks of two engines exactly if they get the
             same buckets
    buckets  those this rank sends or receives, in order
    sums     kind of their checksums (verify.py), the same on all ranks of a link
    direct   peers that could write into this rank's memory or it into theirs; each peer's
             OpenMemory.name, empty for a trainer rank
    """

    digest: str
    buckets: Sequence[RankBucket]
    sums: str
    direct: Mapping[int, str]


class Draft:
    """A rank's part of the plan before its peers were heard."""

    def __init__(self, end: LinkEnd, layouts: Layouts) -> None:
        assert end.roster is not None, "a rank plans with the roster"
        link = end.link
        self._layouts = layouts
        self._link = link
        self._alike = end.roster.alike
        self._sums = end.roster.sums
        self._is_sender = end.is_sender
        self._side_rank = end.side_rank
        hosts = end.roster.listed_hosts(link.num_senders)
        sides = end.side_rank, layouts.source, layouts.target, hosts
        self._flows: dict[int, Flow]
        """By peer, counted over the link."""
        if end.is_sender:
            self._flows = {link.num_senders + flow.peer: flow for flow in plan_sends(*sides)}
        else:
            self._flows = {flow.peer: flow for flow in plan_recvs(*sides)}

    @cached_property
    def answer(self) -> bytes:
        """The rank's encoded PlanAnswer."""
        digests = {peer: flow.digest for peer, flow in self._flows.items()}
        return PlanAnswer.of(digests).encode()

    @cached_property
    def digest(self) -> str:
        """As in RankPlan."""
        digest = hashlib.sha256(f"{self._layouts.digest} {self._alike}".encode())
        return f"{self._layouts.kind} {digest.hexdigest()}"

    @cached_property
    def buckets(self) -> list[RankBucket]:
        """The slices of all pairs, cut into buckets."""
        own: dict[str, list[Shard]] = defaultdict(list)
        for shard in self._layouts.shards:
            own[shard.box.name].append(shard)
        slices = {self._pair(peer): flow.slices for peer, flow in self._flows.items()}
        link = self._link
        buckets = plan_buckets(slices, link.num_receivers, link.bucket_bytes)
        return [RankBucket(each, self._peer_of(each), holdings(each, own)) for each in buckets]

    def finish(self, end: LinkEnd) -> RankPlan:
        """Return the plan for the link of `end`, once its ranks agreed."""
        assert end.roster is not None, "a rank plans with the roster"
        direct: Mapping[int, str] = {}
        if self._sums == XXH3:
            direct = find_direct_peers(end.roster, end.link.num_senders, end.rank)
        return RankPlan(self.digest, self.buckets, self._sums, direct)

    def _pair(self, peer: int) -> tuple[int, int]:
        """Return (source rank, target rank) of this rank and `peer`, each counted on its side."""
        if self._is_sender:
            return self._side_rank, peer - self._link.num_senders
        return peer, self._side_rank

    def _peer_of(self, bucket: Bucket) -> int:
        """Return the bucket's other rank, counted over the link."""
        if self._is_sender:
            return self._link.num_senders + bucket.target_rank
        return bucket.source_rank


def find_direct_peers(roster: Roster, num_senders: int, rank: int) -> dict[int, str]:
    """Return the peers of rank `rank` as in RankPlan.direct."""
    own = roster.met.get(rank)
    if own is None:
        return {}
    direct = {}
    for peer, theirs in roster.met.items():
        is_other_side = (peer < num_senders) != (rank < num_senders)
        writes = own.writes or theirs.writes
        memory = own.memory or theirs.memory
        if is_other_side and own.machine == theirs.machine and writes and memory:
            direct[peer] = theirs.memory
    return direct
