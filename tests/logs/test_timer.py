"""Phases add up, also when one fails, and their beginnings are told."""

import logging
import time

import pytest

from mcore_rl.logs.logger import PhaseTimer


def test_seconds_of_a_phase_add_up_and_survive_an_error() -> None:
    timer = PhaseTimer(1)
    for _ in range(2):
        with timer("train"):
            time.sleep(0.02)
    with pytest.raises(KeyError), timer("sync"):
        raise KeyError
    metrics = timer.metrics()
    assert set(metrics) == {"time/train", "time/sync", "time/step"}
    assert 0.04 <= timer.seconds["train"] < 1.0
    assert metrics["time/step"] >= metrics["time/train"] + metrics["time/sync"]
    waited = timer.metrics(waiting=("train", "rollout"))
    assert waited["idle/trainer"] == pytest.approx(waited["time/train"] / waited["time/step"])


def test_the_log_says_where_a_step_is_before_the_phase_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "mcore_rl"), PhaseTimer(7)("rollout"):
        assert caplog.messages == ["step 7: rollout"]
