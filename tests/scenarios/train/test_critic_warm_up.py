"""The policy's learning rate while and after its critic alone trains, in whole runs of the loop."""

from dataclasses import replace
from typing import Any

import pytest

from mcore_rl.algo.policy_loss import make_policy_loss
from mcore_rl.config import AlgorithmConfig, CriticConfig, OptimizerConfig, TrainConfig
from mcore_rl.loops.training import StepOptions, train_policy_and_critic
from mcore_rl.train.optimizer import compute_learning_rate
from mcore_rl.types import StepStats, TrainBatch
from tests.support.optimizer_steps import CountingCritic, options_of, roles_of, sampled
from tests.support.table_policy import TablePolicy


class RateRecorder(TablePolicy):
    """A policy that notes the learning rate of each optimizer step, as training ranks take it."""

    def __init__(self, optimizer: OptimizerConfig, total_steps: int, num_taken: int) -> None:
        super().__init__(make_policy_loss(AlgorithmConfig(advantage="gae")))
        self._optimizer = optimizer
        self._total_steps = total_steps
        self.num_taken = num_taken
        self.rates: list[float] = []

    def train_step(self, batch: TrainBatch) -> StepStats:
        self.rates.append(compute_learning_rate(self._optimizer, self.num_taken, self._total_steps))
        self.num_taken += 1
        return super().train_step(batch)


def rates_of(options: StepOptions, num_steps: int, taken: int = 0, start: int = 0) -> list[Any]:
    """Return the policy's learning rates by step of the loop, from the step after `start` on."""
    total, total_of_critic = options.count_optimizer_steps(num_steps)
    policy = RateRecorder(options.train.optimizer, total, taken)
    other, batch, _samples = sampled(AlgorithmConfig(advantage="grpo"))
    policy.stores = other.stores
    critic = CountingCritic(policy.stores)
    batch = replace(batch, values_T=critic.compute_values(batch))
    roles = roles_of(policy, critic=critic)
    rates = []
    for step in range(start + 1, num_steps + 1):
        policy.rates = []
        train_policy_and_critic(options, roles, batch, step)
        rates.append([round(rate, 6) for rate in policy.rates])
    assert policy.num_taken == total
    assert start or critic.num_steps == total_of_critic
    return rates


LINEAR = OptimizerConfig(lr=1.0, min_lr=0.2, warmup_steps=2, schedule="linear")


@pytest.mark.parametrize(
    ("warmup_steps", "train", "wanted"),
    [
        (0, {}, [[0.5], [1.0], [1.0], [0.8], [0.6], [0.4]]),
        (2, {}, [[], [], [0.5], [1.0], [1.0], [0.6]]),
        (4, {"mini_batches": 2}, [[], [], [], [], [0.5, 1.0], [1.0, 0.6]]),
        (5, {"mini_batches": 2, "epochs": 2}, [[], [], [], [], [], [0.5, 1.0, 1.0, 0.6]]),
        (6, {}, [[]] * 6),
    ],
)
def test_the_learning_rate_counts_the_optimizer_steps_that_the_policy_takes(
    warmup_steps: int, train: dict[str, Any], wanted: list[list[float]]
) -> None:
    options = options_of(
        AlgorithmConfig(advantage="gae"),
        train=TrainConfig(optimizer=LINEAR, **train),
        critic=CriticConfig(warmup_steps=warmup_steps),
    )
    assert rates_of(options, 6) == wanted


def test_a_resumed_run_goes_on_with_the_learning_rate() -> None:
    """After four steps of the loop, of which the critic alone took three."""
    options = options_of(
        AlgorithmConfig(advantage="gae"),
        train=TrainConfig(optimizer=LINEAR, mini_batches=2),
        critic=CriticConfig(warmup_steps=3),
    )
    whole = rates_of(options, 6)
    assert whole == [[], [], [], [0.5, 1.0], [1.0, 0.8], [0.6, 0.4]]
    assert rates_of(options, 6, taken=2, start=4) == whole[4:]


def test_without_a_critic_the_policy_trains_at_every_step() -> None:
    options = options_of(AlgorithmConfig(), critic=CriticConfig(warmup_steps=3))
    assert options.policy_trains(1) and options.count_optimizer_steps(5) == (5, 0)
