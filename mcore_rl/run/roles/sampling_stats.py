"""Counts finished groups and computes the metrics of background sampling between two steps."""

from collections.abc import Sequence

from mcore_rl.config import RolloutConfig
from mcore_rl.loops.outcomes import RewardFailures
from mcore_rl.loops.sampling import SamplingOptions
from mcore_rl.process.clock import now_s
from mcore_rl.types import StoredSample
from mcore_rl.types.scores import Scores


class SamplingStats:
    """Counts samples since the last step took its groups; each step starts with a new object.

    failures      samples whose reward failed
    num_silent    groups without signal, which dynamic sampling replaces
    num_dropped   samples that were dropped because they were too stale
    num_lost      complete samples that were lost with their collector and are sampled again
    """

    def __init__(self) -> None:
        self._began_s = now_s()
        self._num_groups = 0
        self._num_samples = 0
        self._num_tokens = 0
        self._rewards: list[float] = []
        self.failures = RewardFailures()
        self.num_silent = 0
        self.num_dropped = 0
        self.num_lost = 0

    def note(self, samples: Sequence[StoredSample], scores: Scores) -> None:
        """Count a finished group."""
        self._num_groups += 1
        self._num_samples += len(samples)
        self._num_tokens += sum(sample.response_len for sample in samples)
        self._rewards += scores.outcomes()
        self.failures.note(scores)

    def is_replaced(self, scores: Scores, options: SamplingOptions) -> bool:
        """Return whether to sample another group because this group has no signal.

        A step replaces at most as many groups as dynamic sampling resamples in max_rounds rounds.
        """
        rollout = options.rollout
        if not rollout.dynamic_sampling or options.groups_with_signal(scores):
            return False
        self.num_silent += 1
        return self.num_silent <= (rollout.max_rounds - 1) * rollout.prompts_per_step

    def metrics(self, rollout: RolloutConfig) -> dict[str, float]:
        """Return the metrics so far; metrics of dynamic sampling only if the recipe has it."""
        seconds = now_s() - self._began_s
        metrics = {
            "rollout/tokens_per_second": self._num_tokens / seconds,
            "staleness/dropped": float(self.num_dropped),
            "rollout/lost": float(self.num_lost),
            **self.failures.metrics(),
        }
        if rollout.dynamic_sampling:
            metrics |= {
                "sampling/samples": float(self._num_samples),
                "sampling/kept_share": 1 - self.num_silent / max(self._num_groups, 1),
                "sampling/reward_mean": sum(self._rewards) / max(len(self._rewards), 1),
            }
        return metrics
