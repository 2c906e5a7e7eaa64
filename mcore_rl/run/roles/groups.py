"""Decides which groups of samples may begin, which groups a step takes, and which are too stale.

begun (prompt taken)  ->  finished (samples scored)  ->  taken by a step
     room() says how many      late(): dropped, begun again      choose() says which

With P groups a step, a bound of S versions and engines at version v, at most (S + v + 1) * P groups
have begun since the start of training: the admission rule of AReaL (arXiv:2505.24298, section 5.1).
The rule alone does not bound staleness, because groups that finish early overtake others. So a step
also waits until every group that it leaves still has a place in a later step: for each version k,
no more groups may have to be trained on by version k than the steps up to k have places.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Protocol

from mcore_rl.config import RolloutConfig
from mcore_rl.logs.episode_log import ABORTED, EpisodeLog, list_reasons
from mcore_rl.run.roles.finished_groups import InOrder, OldestFirst, SampleGroup
from mcore_rl.types import Prompt, StoredSample, WeightVersion
from mcore_rl.types.scores import Scores


class OpenPrompts(Protocol):
    """A stream of prompts. After a resume it repeats the prompts that were begun and not ended."""

    def begin(self) -> tuple[int, Prompt]:
        """Return the next prompt and its position in the stream."""
        ...

    def end(self, positions: Sequence[int]) -> None: ...

    def note_scores(self, prompts: Sequence[Prompt], scores: Scores) -> None: ...


class GroupBuffer:
    """The groups that have begun and that no step has taken, in the order of their beginning."""

    def __init__(
        self,
        groups_per_step: int,
        bound: int,
        version: WeightVersion,
        *,
        in_order: bool,
        waits: bool,
        log: EpisodeLog | None = None,
        group_size: int = 1,
    ) -> None:
        """`bound`: the most versions between a sample's oldest token and the weights that train on
        the sample.

        in_order   a step takes the groups that began first, whatever else is finished
        waits      a step waits for groups that otherwise would be too stale for any later step
        log        logs when groups of `group_size` samples begin, and how their samples end
        """
        self._per_step = groups_per_step
        self._bound = bound
        self._order = InOrder() if in_order else OldestFirst()
        self._waits = waits
        self._log = log or EpisodeLog()
        self._group_size = group_size
        self.version = version
        """The version of the engines' weights, which the next step trains."""
        self._num_taken = groups_per_step * version
        self._groups: OrderedDict[SampleGroup, None] = OrderedDict()
        self._num_by_oldest: Counter[int] = Counter()
        """How many groups have their oldest token from each version."""
        self.num_finished = 0

    @property
    def num_unfinished(self) -> int:
        return len(self._groups) - self.num_finished

    def room(self) -> int:
        """Return how many more groups may begin now."""
        num_admitted = (self._bound + self.version + 1) * self._per_step
        return num_admitted - self._num_taken - len(self._groups)

    def begin(self, position: int, prompt: Prompt) -> SampleGroup:
        number = self._log.begin(prompt, self._group_size)
        group = SampleGroup(position, prompt, self.version, number)
        self._groups[group] = None
        self._count(group.oldest, 1)
        self._order.begin(group)
        return group

    def finish(self, group: SampleGroup, samples: Sequence[StoredSample], scores: Scores) -> None:
        """Keep the samples of a group that has begun."""
        group.samples = samples
        group.scores = scores
        versions = (span.version for sample in samples for span in sample.versions)
        self._count(group.oldest, -1)
        group.oldest = min(versions, default=group.born)
        self._count(group.oldest, 1)
        self.num_finished += 1
        self._order.finish(group)

    def remove(self, group: SampleGroup, ends: Sequence[str] | str = ABORTED) -> None:
        """Forget a group that no step takes.

        ends   why the samples ended: one reason for all, or a reason for each
        """
        self._forget(group)
        if isinstance(ends, str):
            self._log.end_all(group.number, ends)
        else:
            self._log.end(group.number, ends)

    def _forget(self, group: SampleGroup) -> None:
        del self._groups[group]
        self._count(group.oldest, -1)
        self.num_finished -= group.is_finished
        self._order.discard(group)

    def _count(self, oldest: int, change: int) -> None:
        """Update `_num_by_oldest`, which has only versions with groups."""
        self._num_by_oldest[oldest] += change
        if not self._num_by_oldest[oldest]:
            del self._num_by_oldest[oldest]

    def close(self) -> None:
        """Log why the samples ended of finished groups that no step will take."""
        for group in self.list_finished():
            self.remove(group, list_reasons(group.samples))

    def list_finished(self) -> list[SampleGroup]:
        return [group for group in self._groups if group.is_finished]

    def late(self) -> list[SampleGroup]:
        """Return the groups that are too stale for the next step, unfinished groups included.

        The answer changes with the version alone.
        """
        return [group for group in self._groups if group.oldest < self.version - self._bound]

    def begin_step(self) -> None:
        """Begin a step anew: groups that it took before, and did not train on, count no longer."""
        self._num_taken = self._per_step * self.version

    def choose(self) -> list[SampleGroup] | None:
        """Take out and return the groups of the next step, or return None while the step must wait.

        A call that returns None takes time in proportion to the versions of the groups, however
        many groups are finished.
        """
        if self.num_finished < self._per_step:
            return None
        by_oldest = self._order.count(self._per_step)
        if by_oldest is None or (self._waits and not self._leaves_places(by_oldest)):
            return None
        chosen = self._order.take(self._per_step)
        for group in chosen:
            self._forget(group)
            self._log.end(group.number, list_reasons(group.samples))
        self._num_taken += len(chosen)
        return chosen

    def _leaves_places(self, by_oldest: Counter[int]) -> bool:
        """Return whether each group that the next step leaves has a place before it is too stale.

        by_oldest   how many groups the next step takes, by version. These groups fill the step, so
                    the groups that are left have places from the version after the step's on
        """
        num_places = 0
        for version in range(self.version, self.version + self._bound + 1):
            num_due = sum(
                num - by_oldest[oldest]
                for oldest, num in self._num_by_oldest.items()
                if oldest + self._bound <= version
            )
            if num_due > num_places:
                return False
            num_places += self._per_step
        return True


def make_buffer(
    rollout: RolloutConfig, version: WeightVersion, log: EpisodeLog | None = None
) -> GroupBuffer:
    """Return an empty buffer for the recipe's mode; the engines serve `version`."""
    return GroupBuffer(
        rollout.prompts_per_step,
        rollout.staleness_bound,
        version,
        in_order=rollout.mode == "one_step_off",
        waits=rollout.stale == "wait",
        log=log,
        group_size=rollout.samples_per_prompt,
    )
