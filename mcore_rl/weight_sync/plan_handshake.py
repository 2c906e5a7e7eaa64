"""Agrees with all ranks of a link on the plan; each rank computes its own part of the plan.

trainer rank: facts -+             +-> its shards -+                    +-> what I send, to whom
                     +--> roster --+               +-> as recorded? ----+
engine rank:  facts -+             +-> its trace  -+   if not, listed   +-> what I get, from whom
                                                                               |
                     each pair's slices compared at the link's store  <--------+

Recorded layouts are a few numbers, which each rank checks against its own shards. If the recorded
layouts are wrong for any rank, all ranks list their shards for one another instead. Links of equal
layouts, hosts and checksums share a rank's part of the plan (`Draft`).
"""

import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from mcore_rl.weight_sync.buckets import Bucket, plan_buckets
from mcore_rl.weight_sync.link_end import LinkEnd, await_roster, publish_facts
from mcore_rl.weight_sync.link_store import LISTED_PLAN, RECORDED_PLAN, PlanAnswer
from mcore_rl.weight_sync.placed_bucket import RankBucket, find_holdings
from mcore_rl.weight_sync.roster import Roster
from mcore_rl.weight_sync.verify import XXH3
from mcore_rl.weight_sync.wire import decode_shards, encode_shards
from mcore_rl.weights.box import Shard
from mcore_rl.weights.layouts.layout import DescribedLayout, HfTensors, Layout, check_rank
from mcore_rl.weights.layouts.listed import ListedLayout, RecordedLayouts
from mcore_rl.weights.lora.layouts import AdapterLayouts
from mcore_rl.weights.lora.places import Content
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
             equal on all ranks of a link, and on the ranks of two engines exactly if both engines
             get the same buckets
    buckets  that this rank sends or receives, in order
    sums     kind of the checksums (verify.py), the same on all ranks of a link
    direct   peers with which direct writes are possible -> the peer's OpenMemory.name, empty for a
             trainer rank
    """

    digest: str
    buckets: Sequence[RankBucket]
    sums: str
    direct: Mapping[int, str]


class Draft:
    """A rank's part of the plan before the rank's peers have answered."""

    def __init__(self, end: LinkEnd, layouts: Layouts) -> None:
        assert end.roster is not None, "a rank plans with the roster"
        link = end.link
        self._layouts = layouts
        self._link = link
        self._alike = end.roster.alike
        self._sums = end.roster.sums
        self._is_sender = end.is_sender
        self._side_rank = end.side_rank
        hosts = end.roster.list_hosts(link.num_senders)
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
        return PlanAnswer.make(digests).encode()

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
        slices = {self._make_pair(peer): flow.slices for peer, flow in self._flows.items()}
        link = self._link
        buckets = plan_buckets(slices, link.num_receivers, link.bucket_bytes)
        return [
            RankBucket(each, self._find_peer(each), find_holdings(each, own)) for each in buckets
        ]

    def finish(self, end: LinkEnd) -> RankPlan:
        """Return the plan for the link of `end`, once the link's ranks have agreed."""
        assert end.roster is not None, "a rank plans with the roster"
        direct: Mapping[int, str] = {}
        if self._sums == XXH3:
            direct = find_direct_peers(end.roster, end.link.num_senders, end.rank)
        return RankPlan(self.digest, self.buckets, self._sums, direct)

    def _make_pair(self, peer: int) -> tuple[int, int]:
        """Return (source rank, target rank) of this rank and `peer`, each numbered on its side."""
        if self._is_sender:
            return self._side_rank, peer - self._link.num_senders
        return peer, self._side_rank

    def _find_peer(self, bucket: Bucket) -> int:
        """Return the bucket's other rank, numbered over the link."""
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


_log = logging.getLogger(__name__)
_LISTS = "layout"
"""Topic of the ranks' lists of shards."""

MakeShards = Callable[[HfTensors], Sequence[Shard]]
"""Returns a rank's own shards; an engine rank traces the tensors that the trainer ranks hold."""


DraftKey = tuple[str, int, str]
"""(layouts and bucket_bytes of a link, `alike` of its roster)"""


class Drafts:
    """Drafts of a rank that holds the same shards over many links; most links are alike."""

    _MOST = 8
    """The most drafts that are kept; drafts for engines on trainer ranks' hosts differ by host."""

    def __init__(self) -> None:
        self._by_key: dict[DraftKey, Draft] = {}

    def get(self, key: DraftKey) -> Draft | None:
        return self._by_key.get(key)

    def keep(self, key: DraftKey, draft: Draft) -> None:
        while len(self._by_key) >= self._MOST:
            del self._by_key[next(iter(self._by_key))]
        self._by_key[key] = draft


class PlanHandshake:
    """One rank's part in the handshake of all ranks of a link."""

    def __init__(self, end: LinkEnd, make_shards: MakeShards, drafts: Drafts | None = None) -> None:
        """`drafts`: earlier drafts to reuse, of a rank with the same shards over all links."""
        self.end = end
        self._make_shards = make_shards
        self._drafts = drafts
        self._draft: Draft | None = None

    def run(self) -> RankPlan:
        """Agree with all ranks at the link's store; return the plan.

        Raises TransferError, which names ranks that are late, failed or disagree.
        """
        end = self.end
        publish_facts(end)
        with end.store.publish_errors(RECORDED_PLAN, end.rank, end.name):
            end.store.publish(RECORDED_PLAN, end.rank, self.answer())
        return self.conclude(end.wait_joined(RECORDED_PLAN).decode())

    def answer(self) -> bytes:
        """Plan by the recorded layouts; return the encoded PlanAnswer to the other ranks.

        An engine rank traces its loader before it waits for the roster. Raises TransferError,
        which names ranks that did not publish their facts by end.deadline_s.
        """
        found = self._find_draft()
        if isinstance(found, str):
            return PlanAnswer(found).encode()
        self._draft = found
        return found.answer

    def conclude(self, problems: str) -> RankPlan:
        """Return the plan; ranks list their shards if the recorded layouts have `problems`."""
        if not problems:
            assert self._draft is not None, "a rank without a problem has a draft"
            return self._draft.finish(self.end)
        if self.end.link.layouts:
            _log.warning(
                "ranks list their shards, because the recorded layouts are wrong for %s", problems
            )
        return self._agree_listed()

    def _find_draft(self) -> Draft | str:
        """Return the draft by the recorded layouts, or why they don't hold for this rank."""
        if not self.end.link.layouts:
            self.end = await_roster(self.end)
            return "no layouts are recorded"
        if self._drafts is None:
            return self._draft_recorded()
        self.end = await_roster(self.end)
        assert self.end.roster is not None, "a rank plans with the roster"
        key = self.end.link.layouts, self.end.link.bucket_bytes, self.end.roster.alike
        draft = self._drafts.get(key) or self._draft_recorded()
        if isinstance(draft, Draft):
            self._drafts.keep(key, draft)
        return draft

    def _draft_recorded(self) -> Draft | str:
        end = self.end
        try:
            source, target = _decode_layouts(end.link.layouts, end.link.content)
        except ValueError as error:
            self.end = await_roster(end)
            return str(error)
        shards = self._make_shards({} if end.is_sender else source.hf_tensors())
        self.end = await_roster(end)
        digest = hashlib.sha256(end.link.layouts.encode()).hexdigest()
        try:
            check_rank(source if end.is_sender else target, end.side_rank, shards)
            return Draft(self.end, Layouts(shards, source, target, "recorded", digest))
        except ValueError as error:
            return str(error)

    def _agree_listed(self) -> RankPlan:
        """Return the plan by the shards that all ranks list for one another."""
        end = self.end
        layouts = self._exchange_lists()
        with end.store.publish_errors(LISTED_PLAN, end.rank, end.name):
            draft = Draft(end, layouts)
            end.store.publish(LISTED_PLAN, end.rank, draft.answer)
        end.wait_joined(LISTED_PLAN)
        return draft.finish(end)

    def _exchange_lists(self) -> Layouts:
        """Publish this rank's shards and collect those of all ranks."""
        end = self.end
        num_senders = end.link.num_senders
        with end.store.publish_errors(_LISTS, end.rank, end.name):
            sources = [] if end.is_sender else end.collect(_LISTS, range(num_senders))
            held = ListedLayout([decode_shards(data) for data in sources])
            shards = self._make_shards(held.hf_tensors())
            end.store.publish(_LISTS, end.rank, encode_shards(shards))
        encoded = end.collect(_LISTS)
        digests = [hashlib.sha256(data).digest() for data in encoded]
        digest = hashlib.sha256(b"".join(digests)).hexdigest()
        lists = [decode_shards(data) for data in encoded]
        source = ListedLayout(lists[:num_senders])
        target = ListedLayout(lists[num_senders:])
        return Layouts(shards, source, target, "listed", digest)


@lru_cache(maxsize=4)
def _decode_layouts(recorded: str, content: Content) -> tuple[DescribedLayout, Layout]:
    """Return both sides' layouts, which cache the placements that they compute.

    Raises ValueError if the sizes do not divide the model.
    """
    if content == "weights":
        decoded = RecordedLayouts.decode(recorded)
        return decoded.source(), decoded.target()
    adapter = AdapterLayouts.decode(recorded)
    return adapter.source(), adapter.target()
