"""The slowest rank of a step: found among its pipeline stage's ranks, from all their seconds."""

import pytest

from mcore_rl.batches.rank_seconds import find_slowest, join_rank_steps, summarize_ranks
from mcore_rl.batches.summary import summarize_critic
from mcore_rl.types import RankStep, StepStats

STATS = StepStats(0.5, 1.0, 1e-3, 100)


@pytest.mark.parametrize(
    ("seconds", "stages", "found"),
    [
        ([1.0, 1.0, 3.0, 1.0], [0, 0, 0, 0], (3.0, 2.0)),
        ([1.0, 3.0], [0, 0], (3.0, 1.0)),
        ([1.0, 1.2, 9.0, 9.9], [0, 0, 1, 1], (1.2, 1.0)),  # a stage may have more work
        ([1.0, 9.0], [0, 1], None),
        ([1.0], [0], None),
        ([0.0, 0.0], [0, 0], None),
        ([2.0, 2.0], [0, 0], (1.0, 1.0)),
    ],
)
def test_the_slowest_rank_is_compared_with_its_stage(
    seconds: list[float], stages: list[int], found: tuple[float, float] | None
) -> None:
    assert find_slowest(seconds, stages) == (pytest.approx(found) if found else None)


def step_of(*seconds: dict[str, float]) -> StepStats:
    """Return the stats of a step. The ranks are of one stage, and the last rank owns the output."""
    steps = [RankStep(None, each, 0) for each in seconds[:-1]]
    return join_rank_steps([*steps, RankStep(STATS, seconds[-1], 0)])


def test_seconds_of_a_steps_optimizer_steps_are_added_up() -> None:
    first = step_of({"train": 1.0, "forward": 1.0}, {"train": 2.0, "forward": 5.0})
    second = step_of({"train": 5.0}, {"train": 1.0})
    assert first.loss == STATS.loss
    assert summarize_ranks([first, second]) == {
        "ranks/lag_in/forward": 5.0,
        "ranks/slowest_in/forward": 1.0,
        "ranks/lag_in/train": 2.0,
        "ranks/slowest_in/train": 0.0,
        "ranks/lag": 8 / 7,
        "ranks/slowest": 1.0,
    }
    assert summarize_critic([second])["critic/ranks/slowest"] == 0.0


def test_a_rank_without_others_and_stats_without_ranks_give_no_metrics() -> None:
    assert summarize_ranks([step_of({"train": 1.0})]) == {}
    assert summarize_ranks([STATS]) == {}
