"""Groups of samples between prompt and trainer: which may begin, which a step takes, what is too stale.

begun (prompt taken)  ->  finished (samples scored)  ->  taken by a step
     room() says how many      is_late: dropped, begun again       choose() says which

With P groups a step, a bound of S versions and engines at version v, no more than (S + v + 1) * P groups are
begun since the start of training (the admission rule of AReaL, arXiv:2505.24298, section 5.1). That alone
bounds nothing where groups that finish early overtake others: a step also has to leave no more groups that
must be trained on by version k than there are places in the steps up to k.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mcore_rl.types import Prompt, Sample, Scores, WeightVersion


@dataclass(eq=False)
class Group:
    """The samples of one prompt. No token of theirs is drawn from weights before `born`."""

    position: int
    """Of the prompt in its stream."""
    prompt: Prompt
    born: WeightVersion
    samples: Sequence[Sample] = ()
    scores: Scores = field(default_factory=lambda: Scores([]))

    @property
    def is_finished(self) -> bool:
        return bool(self.samples)

    @property
    def oldest(self) -> WeightVersion:
        """The version of its oldest token, as far as that is known."""
        return min((span.version for s in self.samples for span in s.versions), default=self.born)


class GroupBuffer:
    """The groups that were begun and not taken, oldest first."""

    def __init__(
        self,
        groups_per_step: int,
        bound: int,
        version: WeightVersion,
        *,
        in_order: bool,
        waits: bool,
    ) -> None:
        """`bound`: versions between a sample's oldest token and the weights that train on it, at most.

        in_order   a step takes the groups that were begun first, whatever else is finished
        waits      a step waits for groups that would have no place any more before they are too stale
        """
        self._per_step, self._bound, self._in_order, self._waits = (
            groups_per_step,
            bound,
            in_order,
            waits,
        )
        self.version = version
        """Of the engines' weights; the next step trains on the same."""
        self._num_taken = groups_per_step * version
        self._groups: list[Group] = []

    @property
    def num_finished(self) -> int:
        return sum(group.is_finished for group in self._groups)

    @property
    def num_unfinished(self) -> int:
        return len(self._groups) - self.num_finished

    def room(self) -> int:
        """How many groups more may begin now."""
        return (
            (self._bound + self.version + 1) * self._per_step - self._num_taken - len(self._groups)
        )

    def begin(self, position: int, prompt: Prompt) -> Group:
        group = Group(position, prompt, self.version)
        self._groups.append(group)
        return group

    def remove(self, group: Group) -> None:
        self._groups.remove(group)

    def late(self) -> list[Group]:
        """Groups that are, or may be once they are finished, too stale for the next step."""
        return [group for group in self._groups if group.oldest < self.version - self._bound]

    def choose(self) -> list[Group] | None:
        """The groups of the next step, taken out; None while it has to wait."""
        if self._in_order:
            chosen = self._groups[: self._per_step]
        else:
            finished = [group for group in self._groups if group.is_finished]
            chosen = sorted(finished, key=lambda group: group.oldest)[: self._per_step]
        if len(chosen) < self._per_step or not all(group.is_finished for group in chosen):
            return None
        left = [group for group in self._groups if group not in chosen]
        if self._waits and not self._have_places(left):
            return None
        self._groups = left
        self._num_taken += len(chosen)
        return chosen

    def _have_places(self, groups: Sequence[Group]) -> bool:
        """Whether each of `groups` can be trained on, from the next version on, before it is too stale."""
        num_places = 0
        for version in range(self.version, self.version + self._bound + 1):
            if sum(group.oldest + self._bound <= version for group in groups) > num_places:
                return False
            num_places += self._per_step
        return True
