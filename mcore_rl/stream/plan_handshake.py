"""Computes a rank's part of the plan from its own shards and compares it with every peer's.

trainer rank: its shards -+                    +-> what I send, to whom  --+
                          +-> as recorded?     |                           +-> equal in each pair?
engine rank:  its trace  -+   if not, listed --+-> what I get, from whom --+

Recorded layouts are a few numbers, which each rank checks against its own shards. If they are wrong
for any rank, all ranks list their shards for one another instead.
"""

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass

from mcore_rl.slices.box import Shard
from mcore_rl.slices.layouts.layout import Layout, check_rank
from mcore_rl.slices.layouts.listed import ListedLayout
from mcore_rl.slices.layouts.recorded import RecordedLayouts, hf_tensors
from mcore_rl.slices.plan.local import Flow, plan_recvs, plan_sends
from mcore_rl.slices.plan.shares import ListedHosts
from mcore_rl.stream.buckets import Bucket, plan_buckets
from mcore_rl.stream.link_end import LinkEnd
from mcore_rl.stream.one_pass import find_library
from mcore_rl.stream.routes.channel import machine_id
from mcore_rl.stream.routes.transport import TransferError
from mcore_rl.stream.verify import XXH3, kinds_of_sums
from mcore_rl.stream.wire import decode_shards, encode_shards

_log = logging.getLogger(__name__)

HfTensors = Mapping[str, tuple[tuple[int, ...], str]]
"""HF name -> shape, torch name of the dtype"""
MakeShards = Callable[[HfTensors], Sequence[Shard]]
"""Returns a rank's own shards; an engine rank traces the tensors that the trainer ranks hold."""


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of the plan.

    digest   "recorded" or "listed", then a sha256 of layouts, hosts and the kind of checksums:
             equal on all ranks of a link, and on the ranks of two engines exactly if they get the
             same buckets
    buckets  those this rank sends or receives, in order
    sums     kind of their checksums (verify.py), the same on all ranks of a link
    shards   this rank's own, by HF name
    direct   peers that could write into this rank's memory or it into theirs; each peer's
             OpenMemory.name, empty for a trainer rank
    """

    digest: str
    buckets: list[Bucket]
    sums: str
    shards: Mapping[str, Sequence[Shard]]
    direct: Mapping[int, str]


@dataclass(frozen=True)
class _Layouts:
    """This rank's shards and the layouts of both sides.

    kind  how the layouts were found: "recorded" or "listed"
    """

    shards: Sequence[Shard]
    source: Layout
    target: Layout
    kind: str
    digest: str


@dataclass(frozen=True)
class _Draft:
    """A rank's part of the plan before its peers were heard.

    flows  peer -> what travels between it and this rank, with peers counted over the link
    """

    layouts: _Layouts
    hosts: ListedHosts
    sums: str
    direct: Mapping[int, str]
    flows: Mapping[int, Flow]

    @property
    def digests(self) -> dict[int, str]:
        return {peer: flow.digest for peer, flow in self.flows.items()}


@dataclass(frozen=True)
class RankMachine:
    """Where a rank runs, as it tells the other ranks.

    name    machine_id()
    sums    kinds of checksums that it computes
    memory  name of an engine rank's OpenMemory, empty without
    writes  whether a trainer rank can write into such memory
    """

    name: str
    sums: Sequence[str]
    memory: str = ""
    writes: bool = False


class PlanHandshake:
    """One rank's part in the handshake of all ranks of a link."""

    def __init__(self, end: LinkEnd) -> None:
        self._end = end
        self._store = end.store
        self._link = end.link

    def run(self, make_shards: MakeShards) -> RankPlan:
        """Agree with all ranks; TransferError names those that are late, failed or disagree.

        Nothing waits for an engine rank before its loader is traced but what needs its shards: the
        trainer ranks plan meanwhile.
        """
        self._publish_machine()
        return self._agree_recorded(make_shards) or self._agree_listed(make_shards)

    def _publish_machine(self) -> None:
        end = self._end
        memory = ""
        if end.memory is not None and find_library() is not None:
            memory = end.memory.name
        writes = end.is_sender and find_library() is not None
        own = RankMachine(machine_id(), kinds_of_sums(end.device), memory, writes)
        self._store.publish("machine", end.rank, json.dumps(astuple(own)).encode())

    def _agree_recorded(self, make_shards: MakeShards) -> RankPlan | None:
        """Return the plan by the recorded layouts, or None if they don't hold for any rank."""
        if not self._link.layouts:
            return None
        end = self._end
        with self._store.errors_published("layout check", end.rank):
            draft = self._draft_recorded(make_shards)
            if isinstance(draft, _Draft):
                self._publish_digests("recorded plan", draft)
            problem = draft if isinstance(draft, str) else ""
            self._store.publish("layout check", end.rank, problem.encode())
        plan = None if isinstance(draft, str) else self._finish(draft)
        problems = [data.decode() for data in end.collect("layout check")]
        named = zip(self._link.names, problems, strict=True)
        wrong = [f"{name}: {problem}" for name, problem in named if problem]
        if wrong:
            _log.warning(
                "ranks list their shards, because the recorded layouts are wrong for %s",
                "; ".join(wrong),
            )
            return None
        assert isinstance(draft, _Draft)
        self._compare("recorded plan", draft.digests)
        return plan

    def _draft_recorded(self, make_shards: MakeShards) -> _Draft | str:
        """Plan by the recorded layouts, or return the reason why they don't hold for this rank."""
        end = self._end
        recorded = RecordedLayouts.decode(self._link.layouts)
        try:
            source = recorded.source()
            target = recorded.target()
        except ValueError as error:
            return str(error)
        shards = make_shards({} if end.is_sender else hf_tensors(source))
        digest = hashlib.sha256(self._link.layouts.encode()).hexdigest()
        try:
            check_rank(source if end.is_sender else target, end.side_rank, shards)
            return self._draft(_Layouts(shards, source, target, "recorded", digest))
        except ValueError as error:
            return str(error)

    def _agree_listed(self, make_shards: MakeShards) -> RankPlan:
        """Return the plan by the shards that all ranks list for one another."""
        layouts = self._exchange_listed(make_shards)
        with self._store.errors_published("plan", self._end.rank):
            draft = self._draft(layouts)
            self._publish_digests("plan", draft)
        self._compare("plan", draft.digests)
        return self._finish(draft)

    def _exchange_listed(self, make_shards: MakeShards) -> _Layouts:
        """Publish this rank's shards and collect those of all ranks."""
        end = self._end
        num_senders = self._link.num_senders
        with self._store.errors_published("layout", end.rank):
            sources = [] if end.is_sender else end.collect("layout", range(num_senders))
            held = ListedLayout([decode_shards(data) for data in sources])
            shards = make_shards(hf_tensors(held))
            self._store.publish("layout", end.rank, encode_shards(shards))
        encoded = end.collect("layout")
        digests = [hashlib.sha256(data).digest() for data in encoded]
        digest = hashlib.sha256(b"".join(digests)).hexdigest()
        lists = [decode_shards(data) for data in encoded]
        source = ListedLayout(lists[:num_senders])
        target = ListedLayout(lists[num_senders:])
        return _Layouts(shards, source, target, "listed", digest)

    def _draft(self, layouts: _Layouts) -> _Draft:
        """Plan this rank's part once the machines of all ranks are known."""
        machines = [RankMachine(*json.loads(data)) for data in self._end.collect("machine")]
        hosts = _hosts_of(machines, self._link.num_senders)
        sums = _common_kind(self._link.names, [machine.sums for machine in machines])
        direct: Mapping[int, str] = {}
        if sums == XXH3:
            direct = direct_peers(machines, self._link.num_senders, self._end.rank)
        end = self._end
        sides = end.side_rank, layouts.source, layouts.target, hosts
        if end.is_sender:
            num_senders = self._link.num_senders
            flows = {num_senders + flow.peer: flow for flow in plan_sends(*sides)}
        else:
            flows = {flow.peer: flow for flow in plan_recvs(*sides)}
        return _Draft(layouts, hosts, sums, direct, flows)

    def _finish(self, draft: _Draft) -> RankPlan:
        """Return the plan of a draft: what travels between two ranks, cut into buckets."""
        layouts = draft.layouts
        own: dict[str, list[Shard]] = defaultdict(list)
        for shard in layouts.shards:
            own[shard.box.name].append(shard)
        slices = {self._pair(peer): flow.slices for peer, flow in draft.flows.items()}
        buckets = plan_buckets(slices, self._link.num_receivers, self._link.bucket_bytes)
        facts = draft.hosts.sources, _shared_hosts(draft.hosts), draft.sums
        digest = hashlib.sha256(" ".join(map(str, (layouts.digest, *facts))).encode())
        name = f"{layouts.kind} {digest.hexdigest()}"
        return RankPlan(name, buckets, draft.sums, own, draft.direct)

    def _pair(self, peer: int) -> tuple[int, int]:
        """Return (source rank, target rank) of this rank and `peer`, each counted on its side."""
        end = self._end
        if end.is_sender:
            return end.rank, peer - self._link.num_senders
        return peer, end.side_rank

    def _publish_digests(self, topic: str, draft: _Draft) -> None:
        self._store.publish(topic, self._end.rank, json.dumps(draft.digests).encode())

    def _compare(self, topic: str, digests: Mapping[int, str]) -> None:
        """Compare the digest of each pair's slices with the one that the peer planned by itself."""
        peers = sorted(digests)
        for peer, answer in zip(peers, self._end.collect(topic, peers), strict=True):
            theirs = json.loads(answer).get(str(self._end.rank))
            if theirs != digests[peer]:
                raise TransferError(
                    f"{self._end.name} and {self._link.names[peer]} made different plans for their"
                    f" pair: {digests[peer]}, {theirs}"
                )


def direct_peers(machines: Sequence[RankMachine], num_senders: int, rank: int) -> dict[int, str]:
    """Return the peers of rank `rank` as in RankPlan.direct."""
    own = machines[rank]
    peers = range(num_senders, len(machines)) if rank < num_senders else range(num_senders)
    direct = {}
    for peer in peers:
        theirs = machines[peer]
        writes = own.writes or theirs.writes
        memory = own.memory or theirs.memory
        if own.name == theirs.name and writes and memory:
            direct[peer] = theirs.memory
    return direct


def _hosts_of(machines: Sequence[RankMachine], num_senders: int) -> ListedHosts:
    """Return the host of each rank; the plan prefers pairs of ranks on one machine."""
    numbers = {name: i for i, name in enumerate(dict.fromkeys(m.name for m in machines))}
    hosts = tuple(numbers[machine.name] for machine in machines)
    return ListedHosts(hosts[:num_senders], hosts[num_senders:])


def _common_kind(names: Sequence[str], kinds: Sequence[Sequence[str]]) -> str:
    """Return the first kind of checksums that all ranks compute.

    Raises TransferError, which names what each rank computes, if there is none.
    """
    for kind in kinds[0]:
        if all(kind in offered for offered in kinds):
            return kind
    offers = "; ".join(f"{name}: {', '.join(k)}" for name, k in zip(names, kinds, strict=True))
    raise TransferError(
        f"the ranks have no kind of checksum in common ({offers}); run one release of mcore_rl on"
        " trainer and engines"
    )


def _shared_hosts(hosts: ListedHosts) -> list[int | None]:
    """Return for each engine rank its host if a trainer rank runs there, else None."""
    return [host if host in hosts.sources else None for host in hosts.targets]
