"""Adds log-probs and values to a batch, and takes the optimizer steps of policy and critic."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from mcore_rl.algo.covariance import with_held_back
from mcore_rl.algo.lookup import needs_of
from mcore_rl.algo.registry import Needs
from mcore_rl.algo.sample_sums import with_sums
from mcore_rl.batches.batch import plan_mini_batches, rows_of_samples
from mcore_rl.batches.stored_batch import (
    select_stored,
    with_stored_weights,
    without_lost,
    without_truncated,
)
from mcore_rl.batches.summary import summarize_critic, summarize_steps
from mcore_rl.config import AlgorithmConfig, CriticConfig, TrainConfig
from mcore_rl.logs.logger import PhaseTimer
from mcore_rl.loops.roles import Critic, OnTokens, Roles, StoredTrainer
from mcore_rl.process.lost_samples import SamplesLostError
from mcore_rl.types import LogprobOptions, StepStats, StoredBatch, StoredSample

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepOptions:
    """The parts of a recipe that say how a batch is trained on. max_response_len: tokens."""

    algorithm: AlgorithmConfig
    train: TrainConfig
    critic: CriticConfig
    max_response_len: int

    @cached_property
    def needs(self) -> Needs:
        """The needs of the algorithm. Raises ValueError naming the option if it is unknown."""
        return needs_of(self.algorithm)

    def policy_trains(self, step: int) -> bool:
        """Return whether the policy trains at `step`: not while its critic, if any, warms up."""
        return not self.needs.critic or step > self.critic.warmup_steps

    def count_optimizer_steps(self, num_steps: int) -> tuple[int, int]:
        """Return the optimizer steps of (policy, critic) in `num_steps` steps of the loop.

        Their learning rates fall to the end of the schedule within these. A policy takes none
        while its critic warms up, and its schedule begins with its first own.
        """
        num_of_policy = sum(map(self.policy_trains, range(1, num_steps + 1)))
        num_of_critic = num_steps if self.needs.critic else 0
        return (
            num_of_policy * self.train.epochs * self.train.mini_batches,
            num_of_critic * self.critic.epochs * self.critic.mini_batches,
        )


def ask_teacher(roles: Roles, timer: PhaseTimer, samples: Sequence[StoredSample]) -> None:
    """Have the stores keep a teacher's log-probs of the samples, if the recipe has a teacher."""
    if roles.teacher is not None:
        with timer("teacher"):
            roles.teacher(samples)


def mask_overlong(
    options: StepOptions, batch: StoredBatch, samples: Sequence[StoredSample]
) -> StoredBatch:
    """Leave responses that were cut off out of the loss, if the recipe says so."""
    if not options.algorithm.filter_overlong:
        return batch
    return without_truncated(batch, samples)


def add_logprobs_and_values(options: StepOptions, roles: Roles, batch: StoredBatch) -> StoredBatch:
    """Add the trainer's log-probs and the critic's values, both from before the first optimizer
    step.
    """
    critic = roles.critic
    batch, values_T = roles.both(
        lambda: add_logprobs(options, roles.trainer, batch),
        lambda: None if critic is None else critic.compute_values(batch),
    )
    return replace(batch, values_T=values_T)


def train_policy_and_critic(
    options: StepOptions, roles: Roles, batch: StoredBatch, step: int
) -> dict[str, float]:
    """Take the optimizer steps of both; the policy takes none while its critic warms up."""
    critic = roles.critic
    if critic is None:
        return train_policy(options, roles, batch, step)
    trains = options.policy_trains(step)
    policy_metrics, critic_metrics = roles.both(
        lambda: train_policy(options, roles, batch, step) if trains else {},
        lambda: train_critic(options, critic, batch, step),
    )
    return policy_metrics | critic_metrics


def train_policy(
    options: StepOptions, roles: Roles, batch: StoredBatch, seed: int
) -> dict[str, float]:
    """Train on every mini-batch of every epoch; return the metrics of all steps as one."""

    def step(part: StoredBatch, i: int) -> StepStats:
        part = _with_held_back(options, roles.on_tokens, part, seed * 1009 + i)
        part = with_sums(options.algorithm, part, is_first=i == 0)
        return roles.trainer.train_step(_set_loss_weights(options, part))

    parts = mini_batches(batch, options.train.mini_batches, options.train.epochs, seed)
    return summarize_steps(
        [_on_what_is_left(part, partial(step, i=i)) for i, part in enumerate(parts)]
    )


def train_critic(
    options: StepOptions, critic: Critic, batch: StoredBatch, seed: int
) -> dict[str, float]:
    """Train on every mini-batch of every epoch; return the metrics of all steps as one."""
    parts = mini_batches(batch, options.critic.mini_batches, options.critic.epochs, seed)

    def step(part: StoredBatch) -> StepStats:
        return critic.train_step(_set_loss_weights(options, part))

    return summarize_critic([_on_what_is_left(part, step) for part in parts])


def mini_batches(batch: StoredBatch, number: int, epochs: int, seed: int) -> Iterator[StoredBatch]:
    """Yield the batch of each optimizer step."""
    rows = rows_of_samples(batch)
    for samples in plan_mini_batches(len(rows), number, epochs, seed):
        yield select_stored(batch, [row for sample in samples for row in rows[sample]])


def add_logprobs(options: StepOptions, trainer: StoredTrainer, batch: StoredBatch) -> StoredBatch:
    """Add the old log-probs if something reads them, and the reference's if the algorithm needs
    them.

    With one optimizer step per rollout the step's own log-probs serve as the old ones.
    """
    needs = options.needs
    num_steps = options.train.epochs * options.train.mini_batches
    reads_old = num_steps > 1 or needs.old_logprobs
    if reads_old and not options.algorithm.correction.bypass:
        old = trainer.compute_logprobs(batch, LogprobOptions(sum_squares=needs.sum_squares))
        batch = replace(
            batch,
            old_logprobs_T=old.logprobs_T,
            router_flips_T=old.router_flips_T,
            sum_squares_T=old.sum_squares_T,
        )
        if old.routed_experts_TLK is not None:
            batch = replace(batch, routed_experts_TLK=old.routed_experts_TLK)
    if needs.reference:
        reference = trainer.compute_logprobs(batch, LogprobOptions(reference=True))
        batch = replace(batch, ref_logprobs_T=reference.logprobs_T)
    return batch


def _on_what_is_left(batch: StoredBatch, step: Callable[[StoredBatch], StepStats]) -> StepStats:
    """Take an optimizer step, without the sequences that are lost with their collector.

    Raises SamplesLostError if none is left.
    """
    while True:
        try:
            return step(batch)
        except SamplesLostError as lost:
            left = without_lost(batch, lost)
            if left is None:
                raise
            num_lost = len(batch.lens_N) - len(left.lens_N)
            _log.warning("%s; an optimizer step leaves out %d sequences", lost, num_lost)
            batch = left


def _with_held_back(
    options: StepOptions, on_tokens: OnTokens, batch: StoredBatch, seed: int
) -> StoredBatch:
    """Set the tokens that the loss holds back, if it holds any back."""
    pick = options.needs.held_back
    if pick is None:
        return batch
    choose = partial(with_held_back, config=options.algorithm, pick=pick, seed=seed)
    [(chosen, _)] = on_tokens([(choose, batch)])
    return chosen


def _set_loss_weights(options: StepOptions, batch: StoredBatch) -> StoredBatch:
    """Set the loss weights of the batch as one optimizer step."""
    return with_stored_weights(batch, options.algorithm.aggregation, options.max_response_len)
