"""Recipe options in, the functions of a run out: advantages from rewards, token losses from log-probs."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from mcore_rl.algo.advantages import ADVANTAGES
from mcore_rl.algo.aggregation import AGGREGATIONS
from mcore_rl.algo.diagnostics import log_ratio, logprob_diff, policy_drift
from mcore_rl.algo.kl import KL_ESTIMATORS
from mcore_rl.algo.losses import LOSSES, Metrics
from mcore_rl.config import AlgorithmConfig
from mcore_rl.types import Sample, TrainBatch

TokenLoss = Callable[[Tensor, Tensor, TrainBatch], tuple[Tensor, Metrics]]
"""(logprobs_T, entropy_T, batch) -> (loss_T, metrics_T).

loss_T is not weighted: the loss of the step is sum(batch.loss_weights_T * loss_T). metrics_T are detached
token values that the caller averages over the loss mask of the step; those named *_max it maximises instead.
"""


def make_advantages(config: AlgorithmConfig) -> Callable[[Sequence[float], Sequence[Sample]], Tensor]:
    """Samples of the same prompt (by Prompt.index) are one group."""
    function = ADVANTAGES[config.advantage]

    def advantages(rewards_N: Sequence[float], samples: Sequence[Sample]) -> Tensor:
        group_N = torch.tensor([sample.prompt.index for sample in samples], dtype=torch.int64)
        return function(torch.tensor(rewards_N, dtype=torch.float64), group_N)

    return advantages


def make_policy_loss(config: AlgorithmConfig) -> TokenLoss:
    """The loss of `config`, picklable. Raises ValueError naming the option that no function answers to."""
    LOSSES[config.loss](config)
    _ = KL_ESTIMATORS[config.kl.estimator], AGGREGATIONS[config.aggregation]
    return partial(policy_loss, config=config)


def policy_loss(
    logprobs_T: Tensor, entropy_T: Tensor, batch: TrainBatch, *, config: AlgorithmConfig
) -> tuple[Tensor, Metrics]:
    """Ratio loss + kl.coef * KL(policy || reference) - entropy_coef * entropy, per token.

    Without batch.old_logprobs_T the batch is on policy: the log-probs themselves, detached, are the old ones.
    Nothing off the loss mask reaches loss, gradient or metrics.
    """
    if batch.advantages_T is None:
        raise ValueError("policy_loss needs batch.advantages_T")
    mask_T = batch.loss_mask_T
    old_logprobs_T = logprobs_T.detach() if batch.old_logprobs_T is None else batch.old_logprobs_T
    log_ratio_T = log_ratio(logprobs_T, old_logprobs_T, mask_T)
    advantages_T = batch.advantages_T.masked_fill(~mask_T, 0.0)
    entropy_T = torch.where(mask_T, entropy_T, 0.0)

    loss_T, metrics = LOSSES[config.loss](config)(log_ratio_T, advantages_T)
    metrics |= {"loss/policy": loss_T.detach(), "loss/entropy": entropy_T.detach()}
    metrics |= policy_drift(log_ratio_T)
    if batch.ref_logprobs_T is not None:
        kl_T = KL_ESTIMATORS[config.kl.estimator](log_ratio(logprobs_T, batch.ref_logprobs_T, mask_T))
        loss_T = loss_T + config.kl.coef * kl_T
        metrics["kl/ref"] = kl_T.detach()
    elif config.kl.coef:
        raise ValueError(f"algorithm.kl.coef={config.kl.coef} needs batch.ref_logprobs_T")
    if config.entropy_coef:
        loss_T = loss_T - config.entropy_coef * entropy_T
    if batch.rollout_logprobs_T is not None:
        clip = {"clip_low": config.clip_low, "clip_high": config.clip_high}
        metrics |= logprob_diff(old_logprobs_T, batch.rollout_logprobs_T, mask_T, **clip)
    return loss_T, metrics


def sft_loss(logprobs_T: Tensor, entropy_T: Tensor, batch: TrainBatch) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood of the tokens on the loss mask."""
    loss_T = -torch.where(batch.loss_mask_T, logprobs_T, 0.0)
    entropy_T = torch.where(batch.loss_mask_T, entropy_T, 0.0).detach()
    return loss_T, {"loss/nll": loss_T.detach(), "loss/entropy": entropy_T}
