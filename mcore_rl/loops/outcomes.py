"""The samples of a step with their scores, and which of them a step trains on."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from mcore_rl.loops.reward_failures import REMEDY, RewardFailureError
from mcore_rl.process.lost_samples import SamplesLostError, find_kept
from mcore_rl.types import WITHOUT_OUTCOME, StoredSample
from mcore_rl.types.scores import Scores

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Rollout:
    """Samples, their scores, and the metrics of drawing them."""

    samples: Sequence[StoredSample]
    scores: Scores
    metrics: Mapping[str, float] = field(default_factory=dict)

    def select(self, places: Sequence[int]) -> "Rollout":
        """Return the samples at `places`, with their scores."""
        chosen = [self.samples[place] for place in places]
        return Rollout(chosen, self.scores.select(places), self.metrics)


def with_outcome(rollout: Rollout) -> Rollout:
    """Leave out the samples that tell nothing of the policy: a reward or an environment failed.

    Their groups are smaller. Raises RewardFailureError if none is left.
    """
    samples, scores = rollout.samples, rollout.scores
    kept = [
        i
        for i, (sample, has_outcome) in enumerate(zip(samples, scores.has_outcome_N, strict=True))
        if has_outcome and sample.finish_reason not in WITHOUT_OUTCOME
    ]
    if len(kept) == len(samples):
        return rollout
    if not kept:
        first = next(filter(None, scores.errors), "see logs/environments")
        raise RewardFailureError(
            f"none of {len(samples)} samples has an outcome, so there is nothing to train on; the"
            f" first: {first!r}. {REMEDY.capitalize()}"
        )
    _log.warning("%d of %d samples have no outcome", len(samples) - len(kept), len(samples))
    return rollout.select(kept)


def leave_out_lost(prepare: Callable[[Rollout], T], rollout: Rollout) -> tuple[Rollout, T]:
    """Call `prepare` without the samples that are lost with their collector; return (rest, result).

    Lost samples are not drawn again: engines may have given up the weights that drew them. Raises
    SamplesLostError if none is left.
    """
    while True:
        try:
            return rollout, prepare(rollout)
        except SamplesLostError as lost:
            kept = find_kept(rollout.samples, lost)
            if not kept:
                raise
            num_samples = len(rollout.samples)
            num_lost = num_samples - len(kept)
            _log.warning(
                "%s; the step goes on without %d of %d samples", lost, num_lost, num_samples
            )
            rollout = rollout.select(kept)
