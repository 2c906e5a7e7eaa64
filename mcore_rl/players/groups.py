"""Decides which groups of samples may begin, which a step takes and which are too stale.

begun (prompt taken)  ->  finished (samples scored)  ->  taken by a step
     room() says how many      late(): dropped, begun again      choose() says which

With P groups a step, a bound of S versions and engines at version v, no more than (S + v + 1) * P
groups are begun since the start of training (the admission rule of AReaL, arXiv:2505.24298, section
5.1). That rule alone does not bound staleness where groups that finish early overtake others. A
step therefore also has to leave no more groups that must be trained on by version k than there are
places in the steps up to k.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mcore_rl.config import RolloutConfig
from mcore_rl.types import Prompt, Sample, Scores, WeightVersion


@dataclass(eq=False)
class SampleGroup:
    """The samples of one prompt, none of whose tokens is drawn from weights older than `born`.

    position   index of the prompt in its stream
    """

    position: int
    prompt: Prompt
    born: WeightVersion
    samples: Sequence[Sample] = ()
    scores: Scores = field(default_factory=lambda: Scores([]))

    @property
    def is_finished(self) -> bool:
        return bool(self.samples)

    @property
    def oldest(self) -> WeightVersion:
        """The version of the oldest token; `born` while there is none."""
        versions = (span.version for sample in self.samples for span in sample.versions)
        return min(versions, default=self.born)


class GroupBuffer:
    """The groups that were begun and not taken yet, oldest first."""

    def __init__(
        self,
        groups_per_step: int,
        bound: int,
        version: WeightVersion,
        *,
        in_order: bool,
        waits: bool,
    ) -> None:
        """`bound`: the most versions between a sample's oldest token and the weights that train on
        it.

        in_order   a step takes the groups that were begun first, whatever else is finished
        waits      a step waits for groups that would otherwise be too stale before they had a place
        """
        self._per_step = groups_per_step
        self._bound = bound
        self._in_order = in_order
        self._waits = waits
        self.version = version
        """The version of the engines' weights; the next step trains on the same."""
        self._num_taken = groups_per_step * version
        self._groups: list[SampleGroup] = []

    @property
    def num_finished(self) -> int:
        return sum(group.is_finished for group in self._groups)

    @property
    def num_unfinished(self) -> int:
        return len(self._groups) - self.num_finished

    def room(self) -> int:
        """Return how many more groups may begin now."""
        num_admitted = (self._bound + self.version + 1) * self._per_step
        return num_admitted - self._num_taken - len(self._groups)

    def begin(self, position: int, prompt: Prompt) -> SampleGroup:
        group = SampleGroup(position, prompt, self.version)
        self._groups.append(group)
        return group

    def remove(self, group: SampleGroup) -> None:
        self._groups.remove(group)

    def late(self) -> list[SampleGroup]:
        """Return the groups that are, or may be once they are finished, too stale for the next
        step.
        """
        return [group for group in self._groups if group.oldest < self.version - self._bound]

    def choose(self) -> list[SampleGroup] | None:
        """Take out and return the groups of the next step, or return None while it has to wait."""
        if self._in_order:
            chosen = self._groups[: self._per_step]
        else:
            finished = [group for group in self._groups if group.is_finished]
            chosen = sorted(finished, key=lambda group: group.oldest)[: self._per_step]
        if len(chosen) < self._per_step or not all(group.is_finished for group in chosen):
            return None
        remaining = [group for group in self._groups if group not in chosen]
        if self._waits and not self._have_places(remaining):
            return None
        self._groups = remaining
        self._num_taken += len(chosen)
        return chosen

    def _have_places(self, groups: Sequence[SampleGroup]) -> bool:
        """Return whether each of `groups` can be trained on before it is too stale.

        The next step's places are taken already, so the first place is with the version after it.
        """
        num_places = 0
        for version in range(self.version, self.version + self._bound + 1):
            num_due = sum(group.oldest + self._bound <= version for group in groups)
            if num_due > num_places:
                return False
            num_places += self._per_step
        return True


def make_buffer(rollout: RolloutConfig, version: WeightVersion) -> GroupBuffer:
    """Return an empty buffer for the recipe's mode; the engines serve `version`."""
    return GroupBuffer(
        rollout.prompts_per_step,
        rollout.staleness_bound,
        version,
        in_order=rollout.mode == "one_step_off",
        waits=rollout.stale == "wait",
    )
