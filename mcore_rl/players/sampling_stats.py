"""What was sampled beside training, counted from one step to the next."""

import time
from collections.abc import Sequence

from mcore_rl.config import RolloutConfig
from mcore_rl.types import Sample, Scores


class SamplingStats:
    """What was sampled since the last step took its groups."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._num_groups, self._num_samples, self._num_tokens, self._rewards = 0, 0, 0, 0.0
        self.num_silent, self.num_dropped = 0, 0

    def note(self, samples: Sequence[Sample], scores: Scores) -> None:
        self._num_groups += 1
        self._num_samples += len(samples)
        self._num_tokens += sum(len(sample.response_ids) for sample in samples)
        self._rewards += sum(scores.rewards_N)

    def metrics(self, rollout: RolloutConfig) -> dict[str, float]:
        seconds = time.monotonic() - self._began_s
        metrics = {
            "rollout/tokens_per_second": self._num_tokens / seconds,
            "staleness/dropped": float(self.num_dropped),
        }
        if rollout.dynamic_sampling:
            metrics |= {
                "sampling/samples": float(self._num_samples),
                "sampling/kept_share": 1 - self.num_silent / max(self._num_groups, 1),
                "sampling/reward_mean": self._rewards / max(self._num_samples, 1),
            }
        return metrics
