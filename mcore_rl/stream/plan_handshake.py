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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.slices.box import Shard
from mcore_rl.slices.layouts.layout import Layout, check_rank
from mcore_rl.slices.layouts.listed import ListedLayout
from mcore_rl.slices.layouts.recorded import RecordedLayouts, hf_tensors
from mcore_rl.slices.plan.local import Flow, plan_recvs, plan_sends
from mcore_rl.slices.plan.shared_region import Slice
from mcore_rl.slices.plan.shares import ListedHosts
from mcore_rl.stream.buckets import Bucket, plan_buckets
from mcore_rl.stream.link_end import LinkEnd
from mcore_rl.stream.routes.channel import machine_id
from mcore_rl.stream.routes.transport import TransferError
from mcore_rl.stream.verify import kinds_of_sums
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
    """

    digest: str
    buckets: list[Bucket]
    sums: str
    shards: Mapping[str, Sequence[Shard]]


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


class PlanHandshake:
    """One rank's part in the handshake of all ranks of a link."""

    def __init__(self, end: LinkEnd) -> None:
        self._end = end
        self._store = end.store
        self._link = end.link

    def run(self, make_shards: MakeShards) -> RankPlan:
        """Agree with all ranks; TransferError names those that are late, failed or disagree."""
        layouts = self._check_recorded(make_shards) or self._exchange_listed(make_shards)
        own: dict[str, list[Shard]] = defaultdict(list)
        for shard in layouts.shards:
            own[shard.box.name].append(shard)
        hosts, sums = self._exchange_machines()
        flows = self._plan(layouts.source, layouts.target, hosts)
        buckets = plan_buckets(flows, self._link.num_receivers, self._link.bucket_bytes)
        shared = _shared_hosts(hosts)
        digest = hashlib.sha256(f"{layouts.digest} {hosts.sources} {shared} {sums}".encode())
        return RankPlan(f"{layouts.kind} {digest.hexdigest()}", buckets, sums, own)

    def _check_recorded(self, make_shards: MakeShards) -> _Layouts | None:
        """Return the recorded layouts, or None if there are none or they are wrong for any rank."""
        if not self._link.layouts:
            return None
        with self._store.errors_published("layout check", self._end.rank):
            layouts = self._decode_recorded(make_shards)
            problem = layouts if isinstance(layouts, str) else ""
            self._store.publish("layout check", self._end.rank, problem.encode())
        problems = [data.decode() for data in self._end.collect("layout check")]
        named = zip(self._link.names, problems, strict=True)
        wrong = [f"{name}: {problem}" for name, problem in named if problem]
        if wrong:
            _log.warning(
                "ranks list their shards, because the recorded layouts are wrong for %s",
                "; ".join(wrong),
            )
            return None
        assert not isinstance(layouts, str)
        return layouts

    def _decode_recorded(self, make_shards: MakeShards) -> _Layouts | str:
        """Return the recorded layouts, or the reason why they don't hold for this rank."""
        end = self._end
        recorded = RecordedLayouts.decode(self._link.layouts)
        try:
            source = recorded.source()
            target = recorded.target()
        except ValueError as error:
            return str(error)
        shards = make_shards({} if end.is_sender else hf_tensors(source))
        try:
            check_rank(source if end.is_sender else target, end.side_rank, shards)
        except ValueError as error:
            return str(error)
        digest = hashlib.sha256(self._link.layouts.encode()).hexdigest()
        return _Layouts(shards, source, target, "recorded", digest)

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

    def _exchange_machines(self) -> tuple[ListedHosts, str]:
        """Return the host of each rank, and the kind of checksums that all can compute.

        The plan prefers pairs of ranks on one machine.
        """
        own = [machine_id(), kinds_of_sums(self._end.device)]
        self._store.publish("machine", self._end.rank, json.dumps(own).encode())
        answers = [json.loads(data) for data in self._end.collect("machine")]
        numbers = {machine: i for i, machine in enumerate(dict.fromkeys(m for m, _ in answers))}
        hosts = tuple(numbers[machine] for machine, _ in answers)
        sums = _common_kind(self._link.names, [kinds for _, kinds in answers])
        return ListedHosts(hosts[: self._link.num_senders], hosts[self._link.num_senders :]), sums

    def _plan(
        self, source: Layout, target: Layout, hosts: ListedHosts
    ) -> dict[tuple[int, int], Iterator[Slice]]:
        """Return (source rank, target rank) -> slices, of the pairs that this rank is part of.

        The digest of each pair's slices is compared with the one that the peer planned by itself.
        """
        end = self._end
        with self._store.errors_published("plan", end.rank):
            flows = self._plan_own(source, target, hosts)
            digests = {peer: flow.digest for peer, flow in flows.items()}
            self._store.publish("plan", end.rank, json.dumps(digests).encode())
        self._compare(digests)
        num_senders = self._link.num_senders
        if end.is_sender:
            return {(end.rank, peer - num_senders): f.slices for peer, f in flows.items()}
        return {(peer, end.side_rank): f.slices for peer, f in flows.items()}

    def _plan_own(self, source: Layout, target: Layout, hosts: ListedHosts) -> dict[int, Flow]:
        """Return peer -> flow, with peers counted over the link."""
        end = self._end
        if end.is_sender:
            sends = plan_sends(end.side_rank, source, target, hosts)
            return {self._link.num_senders + flow.peer: flow for flow in sends}
        recvs = plan_recvs(end.side_rank, source, target, hosts)
        return {flow.peer: flow for flow in recvs}

    def _compare(self, digests: Mapping[int, str]) -> None:
        peers = sorted(digests)
        for peer, answer in zip(peers, self._end.collect("plan", peers), strict=True):
            theirs = json.loads(answer).get(str(self._end.rank))
            if theirs != digests[peer]:
                raise TransferError(
                    f"{self._end.name} and {self._link.names[peer]} made different plans for their"
                    f" pair: {digests[peer]}, {theirs}"
                )


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
