"""Metrics of background sampling between two steps."""

import pytest

from mcore_rl.config import RolloutConfig
from mcore_rl.run.roles.background import SamplingStats
from mcore_rl.types import GroupLease, Prompt, StoredSample
from mcore_rl.types.scores import Scores

EMPTY = StoredSample(Prompt(0, (1,), (), "unit", ""), 0, 0, "stop", (), False, GroupLease(0, 0))


def test_shares_and_means_are_of_what_was_noted() -> None:
    stats = SamplingStats()
    stats.note([EMPTY] * 4, Scores([1.0, 0.0, 0.5, 0.5]))
    stats.note([EMPTY] * 4, Scores([1.0] * 4))
    stats.num_silent = 1
    stats.num_dropped = 8
    stats.num_lost = 12
    metrics = stats.metrics(RolloutConfig(dynamic_sampling=True))
    assert metrics.pop("rollout/tokens_per_second") == 0.0
    assert metrics == {
        "staleness/dropped": 8.0,
        "rollout/lost": 12.0,
        "reward/errors": 0.0,
        "reward/failed_share": 0.0,
        "sampling/samples": 8.0,
        "sampling/kept_share": 0.5,
        "sampling/reward_mean": pytest.approx(0.75),
    }


def test_without_dynamic_sampling_and_without_a_group() -> None:
    metrics = SamplingStats().metrics(RolloutConfig())
    assert metrics.keys() == {
        "rollout/tokens_per_second",
        "staleness/dropped",
        "rollout/lost",
        "reward/errors",
        "reward/failed_share",
    }
    assert set(metrics.values()) == {0.0}
    empty = SamplingStats().metrics(RolloutConfig(dynamic_sampling=True))
    assert empty["sampling/kept_share"] == 1.0 and empty["sampling/reward_mean"] == 0.0
