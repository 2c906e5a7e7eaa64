"""The preference loop: pairs -> log-probs of policy and reference -> a weight per sequence ->
Megatron step.

The loss of a pair couples two sequences, which may lie in different micro-batches and on different
ranks. So a forward pass comes first, and the gradient of the pairs' loss by the log-probs is taken
here (algo/preferences.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

import torch
from torch import Tensor

from mcore_rl.algo.preferences import (
    Likelihoods,
    needs_reference,
    pairs_by_turns,
    preference_weights,
)
from mcore_rl.batches.summary import summarize_steps
from mcore_rl.config import CheckpointConfig, DpoConfig, PreferenceConfig
from mcore_rl.logs.logger import PhaseTimer
from mcore_rl.loops.roles import NO_RECOVERY, BatchStream, Log, Recovery, TokenTrainer
from mcore_rl.loops.saving import is_due, save_if_due, save_timed
from mcore_rl.types import LogprobOptions, StepStats, TrainBatch


@dataclass(frozen=True)
class PreferenceOptions:
    """The parts of a recipe that say how preferences are optimized.

    eval_every_steps   eval.every_steps
    """

    dpo: DpoConfig
    preference: PreferenceConfig
    checkpoint: CheckpointConfig
    eval_every_steps: int


def optimize_preferences(
    options: PreferenceOptions,
    pairs: BatchStream,
    held_out: Sequence[TrainBatch],
    trainer: TokenTrainer,
    log: Log,
    start_step: int = 0,
    recovery: Recovery = NO_RECOVERY,
) -> None:
    """Run steps start_step + 1 .. dpo.steps of dpo.batch_size pairs each."""
    last_step = options.dpo.steps
    for step in range(start_step + 1, last_step + 1):
        timer = PhaseTimer(step)
        batch = pairs.next_batch(2 * options.dpo.batch_size)

        def train_on(
            batch: TrainBatch = batch, timer: PhaseTimer = timer
        ) -> tuple[StepStats, dict[str, float]]:
            with timer("logprobs"):
                weighted, metrics = with_pair_gradient(batch, trainer, options.preference)
            with timer("train"):
                return trainer.train_step(weighted), metrics

        (stats, metrics), recoverable = recovery.train(step, train_on)
        # The trained loss has the gradient of the pairs' loss but not its value.
        loss = {"loss/total": metrics["preference/loss"]}
        speed = {"train/tokens_per_second": stats.num_tokens / timer.seconds["train"]}
        trained = {**summarize_steps([stats]), **loss, **metrics, **speed}
        log.log(step, {**trained, **recoverable, **timer.metrics()})
        if held_out and is_due(step, options.eval_every_steps, last_step):
            evaluate = partial(evaluate_pairs, held_out, trainer, options.preference)
            log.log(step, recovery.repeat(evaluate))
        state = {"step": step, "pairs": pairs.state_dict()}
        if step < last_step:
            recovery.note_done(step, state)
        save = partial(recovery.save, step, partial(trainer.save, step, state))
        save = partial(save_timed, log, timer, save)
        save_if_due(step, options.checkpoint.every_steps, last_step, save)


def evaluate_pairs(
    held_out: Sequence[TrainBatch], trainer: TokenTrainer, options: PreferenceConfig
) -> dict[str, float]:
    """Return the means of the preference metrics over all pairs of the batches, as
    eval/preference/*.
    """
    metrics = [with_pair_gradient(batch, trainer, options)[1] for batch in held_out]
    sizes = [len(batch.lens_N) for batch in held_out]
    return {f"eval/{name}": fmean((m[name] for m in metrics), sizes) for name in metrics[0]}


def with_pair_gradient(
    batch: TrainBatch, trainer: TokenTrainer, options: PreferenceConfig
) -> tuple[TrainBatch, dict[str, float]]:
    """Return (the batch with each token's weight as its advantage, metrics).

    Chosen and rejected sequences alternate in `batch`.
    """
    logprobs_T = trainer.compute_logprobs(batch).logprobs_T
    ref_N = None
    if needs_reference(options):
        reference = trainer.compute_logprobs(batch, LogprobOptions(reference=True))
        ref_N = sum_over_responses(batch, reference.logprobs_T)
    num_tokens_N = sum_over_responses(batch, torch.ones_like(logprobs_T))
    likelihoods = Likelihoods(sum_over_responses(batch, logprobs_T), num_tokens_N, ref_N)
    weights_N, metrics = preference_weights(likelihoods, pairs_by_turns(len(batch.lens_N)), options)
    weights_T = weights_N.float().repeat_interleave(torch.tensor(batch.lens_N))
    advantages_T = weights_T * batch.loss_mask_T
    return replace(batch, old_logprobs_T=logprobs_T, advantages_T=advantages_T), metrics


def sum_over_responses(batch: TrainBatch, values_T: Tensor) -> Tensor:
    """float64 [N]: the sum of values_T over the trained tokens of each sequence."""
    values_T = torch.where(batch.loss_mask_T, values_T, 0.0).double()
    return torch.segment_reduce(values_T, "sum", lengths=torch.tensor(batch.lens_N))
