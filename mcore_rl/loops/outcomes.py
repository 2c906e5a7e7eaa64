"""Leaves out the samples of a step that tell nothing of the policy."""

import logging

from mcore_rl.loops.reward_failures import REMEDY, RewardFailureError
from mcore_rl.loops.roles import Samples
from mcore_rl.types import WITHOUT_OUTCOME
from mcore_rl.types.scores import Scores

_log = logging.getLogger(__name__)


def with_outcome(samples: Samples, scores: Scores) -> tuple[Samples, Scores]:
    """Leave out the samples that tell nothing of the policy: a reward or an environment failed.

    Their groups are smaller. Raises RewardFailureError if none is left.
    """
    kept = [
        i
        for i, (sample, has_outcome) in enumerate(zip(samples, scores.has_outcome_N, strict=True))
        if has_outcome and sample.finish_reason not in WITHOUT_OUTCOME
    ]
    if len(kept) == len(samples):
        return samples, scores
    if not kept:
        first = next(filter(None, scores.errors), "see logs/environments")
        raise RewardFailureError(
            f"none of {len(samples)} samples has an outcome, so there is nothing to train on; the"
            f" first: {first!r}. {REMEDY.capitalize()}"
        )
    _log.warning("%d of %d samples have no outcome", len(samples) - len(kept), len(samples))
    return [samples[i] for i in kept], scores.select(kept)
