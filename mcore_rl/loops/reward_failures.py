"""Counts samples whose reward failed, and ends the run where a recipe does not bear as many."""

from dataclasses import dataclass

from mcore_rl.config import RewardConfig
from mcore_rl.types.scores import Scores

REMEDY = "mend what failed and give the same command again: it goes on after the last checkpoint"
LEAST_FAILURES = 8
"""Fewer failures than these tell nothing of a share, unless all samples failed: a worker that dies
takes a few episodes with it, which may be a large part of a small step.
"""


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
