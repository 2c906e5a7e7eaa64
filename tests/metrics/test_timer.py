"""Phases add up, also when one fails."""

import time

import pytest

from mcore_rl.metrics import PhaseTimer


def test_seconds_of_a_phase_add_up_and_survive_an_error() -> None:
    timer = PhaseTimer()
    for _ in range(2):
        with timer("train"):
            time.sleep(0.02)
    with pytest.raises(KeyError), timer("refit"):
        raise KeyError
    metrics = timer.metrics()
    assert set(metrics) == {"time/train", "time/refit", "time/step"}
    assert 0.04 <= timer.seconds["train"] < 1.0
    assert metrics["time/step"] >= metrics["time/train"] + metrics["time/refit"]
