"""What trainer and critic do with a step's batch: its log-probs and values, then optimizer steps on it."""

from collections.abc import Iterator
from dataclasses import replace

from mcore_rl.algo.covariance import with_held_back
from mcore_rl.config import Config
from mcore_rl.data.batch import plan_mini_batches, select, with_loss_weights
from mcore_rl.data.summary import summarize_critic, summarize_steps
from mcore_rl.roles import Critic, Roles, Trainer
from mcore_rl.types import LogprobOptions, TrainBatch


def add_logprobs_and_values(config: Config, roles: Roles, batch: TrainBatch) -> TrainBatch:
    """What trainer and critic say of the batch before any of its steps."""
    critic = roles.critic
    batch, values_T = roles.both(
        lambda: add_logprobs(config, roles.trainer, batch),
        lambda: critic and critic.compute_values(batch),
    )
    return replace(batch, values_T=values_T)


def train_policy_and_critic(
    config: Config, roles: Roles, batch: TrainBatch, step: int
) -> dict[str, float]:
    """The optimizer steps of both on the batch; the policy's once the critic is warm."""
    critic = roles.critic
    if critic is None:
        return train_policy(config, roles.trainer, batch, step)
    is_warm = step > config.critic.warmup_steps
    of_policy, of_critic = roles.both(
        lambda: train_policy(config, roles.trainer, batch, step) if is_warm else {},
        lambda: train_critic(config, critic, batch, step),
    )
    return of_policy | of_critic


def train_policy(
    config: Config, trainer: Trainer, batch: TrainBatch, seed: int
) -> dict[str, float]:
    algorithm, train = config.algorithm, config.train
    stats = []
    for i, part in enumerate(mini_batches(batch, train.mini_batches, train.epochs, seed)):
        part = with_held_back(part, algorithm, seed * 1009 + i)
        stats.append(trainer.train_step(_weighted(config, part)))
    return summarize_steps(stats)


def train_critic(config: Config, critic: Critic, batch: TrainBatch, seed: int) -> dict[str, float]:
    parts = mini_batches(batch, config.critic.mini_batches, config.critic.epochs, seed)
    return summarize_critic([critic.train_step(_weighted(config, part)) for part in parts])


def mini_batches(batch: TrainBatch, number: int, epochs: int, seed: int) -> Iterator[TrainBatch]:
    """The batch of each optimizer step."""
    return (
        select(batch, indices)
        for indices in plan_mini_batches(len(batch.lens_N), number, epochs, seed)
    )


def add_logprobs(config: Config, trainer: Trainer, batch: TrainBatch) -> TrainBatch:
    """Old log-probs if the batch takes several steps (else each step's own serve), reference ones for KL."""
    algorithm, num_steps = config.algorithm, config.train.epochs * config.train.mini_batches
    if not algorithm.correction.bypass and (num_steps > 1 or algorithm.needs_old_logprobs):
        old = trainer.compute_logprobs(
            batch, LogprobOptions(sum_squares=algorithm.needs_sum_squares)
        )
        batch = replace(
            batch,
            old_logprobs_T=old.logprobs_T,
            router_flips_T=old.router_flips_T,
            sum_squares_T=old.sum_squares_T,
        )
        if old.routed_experts_TLK is not None:
            batch = replace(batch, routed_experts_TLK=old.routed_experts_TLK)
    if algorithm.needs_reference:
        reference = trainer.compute_logprobs(batch, LogprobOptions(reference=True))
        batch = replace(batch, ref_logprobs_T=reference.logprobs_T)
    return batch


def _weighted(config: Config, batch: TrainBatch) -> TrainBatch:
    """As one optimizer step."""
    return with_loss_weights(batch, config.algorithm.aggregation, config.rollout.max_response_len)
