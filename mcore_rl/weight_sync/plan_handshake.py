"""Agrees with all ranks of a link on the plan, of which each rank computes its own part.

trainer rank: facts -+             +-> its shards -+                    +-> what I send, to whom
                     +--> roster --+               +-> as recorded? ----+
engine rank:  facts -+             +-> its trace  -+   if not, listed   +-> what I get, from whom
                                                                               |
                     each pair's slices compared by the link's keeper  <-------+

Recorded layouts are a few numbers, which each rank checks against its own shards. If they are wrong
for any rank, all ranks list their shards for one another instead.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache

from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.link_keeper import LISTED_PLAN, RECORDED_PLAN, PlanAnswer
from mcore_rl.weight_sync.meeting import publish_facts, with_roster
from mcore_rl.weight_sync.rank_plan import Draft, Layouts, RankPlan
from mcore_rl.weight_sync.wire import decode_shards, encode_shards
from mcore_rl.weights.box import Shard
from mcore_rl.weights.layouts.layout import HfTensors, Layout, check_rank
from mcore_rl.weights.layouts.listed import ListedLayout, RecordedLayouts
from mcore_rl.weights.layouts.megatron import MegatronLayout

_log = logging.getLogger(__name__)
_LISTS = "layout"
"""Topic of the ranks' lists of shards."""

MakeShards = Callable[[HfTensors], Sequence[Shard]]
"""Returns a rank's own shards; an engine rank traces the tensors that the trainer ranks hold."""


DraftKey = tuple[str, int, str]
"""(layouts and bucket_bytes of a link, `alike` of its roster)"""


class Drafts:
    """Drafts of a rank that holds the same shards over many links, most of which are alike."""

    _MOST = 8
    """Kept at a time; engines on hosts of trainer ranks differ by the host."""

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
        """A rank whose shards are the same over all links passes `drafts` to reuse."""
        self.end = end
        self._make_shards = make_shards
        self._drafts = drafts
        self._draft: Draft | None = None

    def run(self) -> RankPlan:
        """Agree with all ranks at the link's store.

        Raises TransferError, which names ranks that are late, failed or disagree.
        """
        end = self.end
        publish_facts(end)
        with end.store.errors_published(RECORDED_PLAN, end.rank, end.name):
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
            self.end = with_roster(self.end)
            return "no layouts are recorded"
        if self._drafts is None:
            return self._draft_recorded()
        self.end = with_roster(self.end)
        assert self.end.roster is not None, "a rank plans with the roster"
        key = self.end.link.layouts, self.end.link.bucket_bytes, self.end.roster.alike
        draft = self._drafts.get(key) or self._draft_recorded()
        if isinstance(draft, Draft):
            self._drafts.keep(key, draft)
        return draft

    def _draft_recorded(self) -> Draft | str:
        end = self.end
        try:
            source, target = _layouts_of(end.link.layouts)
        except ValueError as error:
            self.end = with_roster(end)
            return str(error)
        shards = self._make_shards({} if end.is_sender else source.hf_tensors())
        self.end = with_roster(end)
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
        with end.store.errors_published(LISTED_PLAN, end.rank, end.name):
            draft = Draft(end, layouts)
            end.store.publish(LISTED_PLAN, end.rank, draft.answer)
        end.wait_joined(LISTED_PLAN)
        return draft.finish(end)

    def _exchange_lists(self) -> Layouts:
        """Publish this rank's shards and collect those of all ranks."""
        end = self.end
        num_senders = end.link.num_senders
        with end.store.errors_published(_LISTS, end.rank, end.name):
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
def _layouts_of(recorded: str) -> tuple[MegatronLayout, Layout]:
    """Return both sides' layouts, which remember the placements that they computed.

    Raises ValueError if the sizes do not divide the model.
    """
    decoded = RecordedLayouts.decode(recorded)
    return decoded.source(), decoded.target()
