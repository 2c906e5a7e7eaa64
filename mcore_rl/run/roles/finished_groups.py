"""Keeps finished groups in the order in which steps take them, so that no wake-up scans all groups.

The two orders have the same methods: begin, finish, discard, count and take.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from mcore_rl.types import Prompt, StoredSample, WeightVersion
from mcore_rl.types.scores import Scores


@dataclass(eq=False)
class SampleGroup:
    """The samples of one prompt; no token is older than weights `born`.

    position   index of the prompt in its stream
    oldest     the version of the oldest token; `born` while there are no tokens
    number     of the group in the log of episodes; groups that begin later have higher numbers
    """

    position: int
    prompt: Prompt
    born: WeightVersion
    number: int
    samples: Sequence[StoredSample] = ()
    scores: Scores = field(default_factory=lambda: Scores([]))

    def __post_init__(self) -> None:
        self.oldest = self.born

    @property
    def is_finished(self) -> bool:
        return bool(self.samples)


class OldestFirst:
    """A step takes the groups with the oldest tokens; among equally old groups, the first begun."""

    def __init__(self) -> None:
        self._by_version: dict[int, set[SampleGroup]] = {}
        """The finished groups by the version of their oldest token; no set is empty."""

    def begin(self, group: SampleGroup) -> None:
        """Note that a group has begun."""

    def finish(self, group: SampleGroup) -> None:
        """Note that a group has finished."""
        self._by_version.setdefault(group.oldest, set()).add(group)

    def discard(self, group: SampleGroup) -> None:
        """Forget a group, finished or not."""
        same = self._by_version.get(group.oldest, set())
        same.discard(group)
        if not same:
            self._by_version.pop(group.oldest, None)

    def count(self, num: int) -> Counter[int] | None:
        """Return version -> number of groups that `take` would return; None if it cannot yet."""
        counts: Counter[int] = Counter()
        for version in sorted(self._by_version):
            if counts.total() == num:
                break
            counts[version] = min(len(self._by_version[version]), num - counts.total())
        return counts if counts.total() == num else None

    def take(self, num: int) -> list[SampleGroup]:
        """Return the next `num` groups; the groups stay here until they are discarded."""
        taken: list[SampleGroup] = []
        for version in sorted(self._by_version):
            if len(taken) == num:
                break
            in_order = sorted(self._by_version[version], key=lambda group: group.number)
            taken += in_order[: num - len(taken)]
        return taken


class InOrder:
    """A step takes the groups that were begun first, once all of them are finished."""

    def __init__(self) -> None:
        self._unfinished: OrderedDict[SampleGroup, None] = OrderedDict()
        """In the order in which they were begun."""
        self._finished: list[tuple[int, SampleGroup]] = []
        """A heap by number; groups that were discarded may remain in it."""
        self._kept: set[SampleGroup] = set()
        """The groups of `_finished` that were not discarded."""
        self._leading: OrderedDict[SampleGroup, None] = OrderedDict()
        """The finished groups that were begun before every unfinished one, in order."""

    def begin(self, group: SampleGroup) -> None:
        """Note that a group has begun."""
        self._unfinished[group] = None

    def finish(self, group: SampleGroup) -> None:
        """Note that a group has finished."""
        del self._unfinished[group]
        heapq.heappush(self._finished, (group.number, group))
        self._kept.add(group)

    def discard(self, group: SampleGroup) -> None:
        """Forget a group, finished or not."""
        self._unfinished.pop(group, None)
        self._leading.pop(group, None)
        self._kept.discard(group)

    def count(self, num: int) -> Counter[int] | None:
        """Return version -> number of groups that `take` would return; None if it cannot yet."""
        self._lead()
        if len(self._leading) < num:
            return None
        return Counter(group.oldest for group in self.take(num))

    def take(self, num: int) -> list[SampleGroup]:
        """Return the next `num` groups; the groups stay here until they are discarded."""
        return list(islice(self._leading, num))

    def _lead(self) -> None:
        """Move groups to the leading ones, each once, up to the first that is not finished."""
        first = next(iter(self._unfinished), None)
        while self._finished and (first is None or self._finished[0][0] < first.number):
            _, group = heapq.heappop(self._finished)
            if group in self._kept:
                self._kept.remove(group)
                self._leading[group] = None
