"""The learning-rate schedule, and the parts of an optimizer."""

from types import SimpleNamespace
from typing import Any

import pytest

from mcore_rl.config import OptimizerConfig
from mcore_rl.train.optimizer import compute_learning_rate, parts_of, set_learning_rate


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.86819805, 0.55, 0.23180195, 0.1, 0.1]),
    ],
)
def test_learning_rate(schedule: Any, wanted: list[float]) -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=2, schedule=schedule)
    if schedule == "constant":
        config.min_lr = 0.0
    rates = [compute_learning_rate(config, step, total_steps=6) for step in range(8)]
    assert rates == pytest.approx(wanted)


def test_a_schedule_shorter_than_its_warm_up() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=10, schedule="linear")
    assert compute_learning_rate(config, 4, total_steps=5) == pytest.approx(0.5)
    assert compute_learning_rate(config, 20, total_steps=5) == 0.0


def test_every_group_gets_the_rate() -> None:
    optimizer: Any = SimpleNamespace(param_groups=[{"lr": 1.0, "eps": 0.5}, {"lr": 2.0}])
    set_learning_rate(optimizer, 0.25)
    assert optimizer.param_groups == [{"lr": 0.25, "eps": 0.5}, {"lr": 0.25}]


def test_chained_optimizers_are_parts_and_a_single_one_is_its_only_part() -> None:
    dense, experts = SimpleNamespace(), SimpleNamespace()
    chained: Any = SimpleNamespace(chained_optimizers=[dense, experts])
    single: Any = dense
    assert parts_of(chained) == [dense, experts]
    assert parts_of(single) == [dense]
