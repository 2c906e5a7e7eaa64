"""Speed of a step: tokens and operations per second and rank, and their share of the peak."""

import pytest

from mcore_rl.run.roles.trainer import TrainSpeed
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.flops import ModelFlops

FLOPS = ModelFlops.from_facts(ModelFacts.read("recipes/model/qwen3_30b_a3b"))


def test_operations_are_divided_by_seconds_and_ranks() -> None:
    metrics = TrainSpeed(FLOPS, 4, 1e15).metrics((1000, 3000), seconds=2.0)
    assert metrics["train/tokens_per_second_per_gpu"] == 500
    flops = FLOPS.count_training((1000, 3000)) / 8
    assert metrics["train/tflops_per_gpu"] == pytest.approx(flops / 1e12)
    assert metrics["train/mfu"] == pytest.approx(flops / 1e15)


def test_the_work_of_a_tower_counts() -> None:
    text = TrainSpeed(FLOPS, 4, 1e15).metrics((1000,), seconds=2.0)
    both = TrainSpeed(FLOPS, 4, 1e15).metrics((1000,), seconds=2.0, tower_tflop=16.0)
    assert both["train/tflops_per_gpu"] - text["train/tflops_per_gpu"] == pytest.approx(2.0)
    assert both["train/mfu"] > text["train/mfu"]
    tokens = "train/tokens_per_second_per_gpu"
    assert both[tokens] == text[tokens]


def test_without_a_known_peak_there_is_no_share_of_it() -> None:
    assert "train/mfu" not in TrainSpeed(FLOPS, 1, None).metrics((5,), seconds=1.0)
