"""The samples of a step with their scores, and which of them a step trains on.

Samples whose reward failed are counted; a recipe says how many failures it bears before a run ends.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from mcore_rl.config import RewardConfig
from mcore_rl.process.lost_samples import SamplesLostError, find_kept
from mcore_rl.types import WITHOUT_OUTCOME, StoredBatch, StoredSample
from mcore_rl.types.scores import Scores

_log = logging.getLogger(__name__)
T = TypeVar("T")
REMEDY = "mend what failed and give the same command again: it goes on after the last checkpoint"
LEAST_FAILURES = 8
"""Fewer failures than these tell nothing of a share, unless all samples failed: a worker that dies
takes a few episodes with it, which may be a large part of a small step.
"""


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


class RewardFailureError(RuntimeError):
    """More rewards failed than the recipe bears; the message says how many, and the first error."""


@dataclass
class RewardFailures:
    """The failures among the samples that were noted.

    num_failed       all of them
    num_not_scored   those of functions and models; the others were lost with their environment
    first            the first error
    first_not_scored the first of functions and models
    """

    num_samples: int = 0
    num_failed: int = 0
    num_not_scored: int = 0
    first: str = ""
    first_not_scored: str = ""

    @property
    def share(self) -> float:
        return self.num_failed / max(self.num_samples, 1)

    def note(self, scores: Scores) -> None:
        """Count samples that were scored."""
        failed = [i for i, error in enumerate(scores.errors) if error]
        not_scored = [i for i in failed if not scores.is_lost_N[i]]
        self.num_samples += len(scores.rewards_N)
        self.num_failed += len(failed)
        self.num_not_scored += len(not_scored)
        if failed:
            self.first = self.first or scores.errors[failed[0]]
        if not_scored:
            self.first_not_scored = self.first_not_scored or scores.errors[not_scored[0]]

    def check(self, config: RewardConfig, what: str) -> None:
        """Raise RewardFailureError if more have failed than the recipe bears.

        Of functions and models, reward.on_error=stop bears none. From LEAST_FAILURES on, or if all
        samples failed, the share of all failures is at most reward.max_failed_share.

        what   the step or evaluation whose samples were noted, for the message
        """
        if config.on_error == "stop" and self.num_not_scored:
            raise RewardFailureError(
                f"{what}: reward.on_error=stop, and {self.num_not_scored} of {self.num_samples}"
                f" rewards failed, at first with {self.first_not_scored!r}; {REMEDY}. Or set"
                " reward.on_error=leave_out, which trains without such samples"
            )
        are_many = self.num_failed >= min(LEAST_FAILURES, self.num_samples)
        if are_many and self.share > config.max_failed_share:
            raise RewardFailureError(
                f"{what}: {self.num_failed} of {self.num_samples} rewards failed, a share of"
                f" {self.share:.3g} above reward.max_failed_share={config.max_failed_share:g};"
                f" the first: {self.first!r}. {REMEDY.capitalize()}. Or raise"
                " reward.max_failed_share"
            )

    def metrics(self) -> dict[str, float]:
        return {"reward/errors": float(self.num_failed), "reward/failed_share": self.share}


def has_tokens(rollout: Rollout) -> bool:
    """Return whether a sample with an outcome has a token, or none has an outcome."""
    places = _find_with_outcome(rollout)
    return not places or any(rollout.samples[place].response_len for place in places)


def with_outcome(rollout: Rollout) -> Rollout:
    """Leave out the samples that tell nothing of the policy: a reward or an environment failed.

    Their groups are smaller. Raises RewardFailureError if none is left.
    """
    samples, scores = rollout.samples, rollout.scores
    kept = _find_with_outcome(rollout)
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


def _find_with_outcome(rollout: Rollout) -> list[int]:
    """Return the places of the samples that tell something of the policy."""
    pairs = zip(rollout.samples, rollout.scores.has_outcome_N, strict=True)
    return [
        place
        for place, (sample, has_outcome) in enumerate(pairs)
        if has_outcome and sample.finish_reason not in WITHOUT_OUTCOME
    ]


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


def add_advantages(drawn: Rollout, kept: Rollout, batch: StoredBatch) -> Scores:
    """Return the scores of `drawn` with the advantages of `batch`, if they are by sample.

    batch   made of the samples of `kept`, which are some of those of `drawn`
    """
    if not isinstance(batch.advantages_N, np.ndarray):
        return drawn.scores
    present = [sample for sample in kept.samples if sample.response_len]
    places = range(len(present)) if batch.sample_N is None else batch.sample_N.tolist()
    values = batch.advantages_N.tolist()
    value_of = {id(present[n]): value for n, value in zip(places, values, strict=True)}
    advantages_N = [value_of.get(id(sample), np.nan) for sample in drawn.samples]
    return replace(drawn.scores, advantages_N=advantages_N)
