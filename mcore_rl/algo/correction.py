"""Turns log-probs of engine and trainer into importance weights of the sampled tokens.

There are three policies: the engine's (rollout), the trainer's with the same or newer weights
(old), and the one being trained. The policy loss corrects for policy / old, and these weights
correct for old / rollout (decoupled PPO, arXiv:2110.00641, eq. 11).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mcore_rl.algo.diagnostics import log_ratio
from mcore_rl.algo.kl import KL_ESTIMATORS
from mcore_rl.algo.registry import Metrics, Needs, Registry
from mcore_rl.algo.sequences import Sequences, sequence_sum
from mcore_rl.config import AlgorithmConfig, CorrectionConfig
from mcore_rl.types import TrainBatch

MAX_LOG_WEIGHT = 20.0
"""Sequence weights stay within exp(+-20): exp(89) is infinite in float32."""
_OF_SAMPLES = Needs(whole_samples=True)

MIN_NORMALIZER = 1e-8
"""Weights whose mean is no larger stay as they are."""

OfTokens = Callable[[Tensor, Sequences], Tensor]
"""(log_ratio_T, sums over samples) -> log_weight_T."""
IsOutside = Callable[[Tensor], Tensor]
"""values_T -> bool, outside the range that is not rejected."""
Rejection = Callable[[Tensor, Sequences, IsOutside], Tensor]
"""(kl_T, sums over samples, is_outside) -> bool, tokens that are left out."""

WEIGHTS: Registry[OfTokens] = Registry("algorithm.correction.weight")
REJECTIONS: Registry[Rejection] = Registry("algorithm.correction.reject")


def old_policy(batch: TrainBatch, config: AlgorithmConfig) -> Tensor | None:
    """Return the log-probs that the policy loss compares with; None for a batch on policy."""
    return batch.rollout_logprobs_T if config.correction.bypass else batch.old_logprobs_T


@WEIGHTS.register("none")
def no_weight(log_ratio_T: Tensor, sequences: Sequences) -> Tensor:
    """0."""
    return torch.zeros_like(log_ratio_T)


@WEIGHTS.register("token")
def token_weight(log_ratio_T: Tensor, sequences: Sequences) -> Tensor:
    """The token's own ratio."""
    return log_ratio_T


@WEIGHTS.register("sequence", _OF_SAMPLES)
def sequence_weight(log_ratio_T: Tensor, sequences: Sequences) -> Tensor:
    """The product of the ratios of the sample, held within exp(+-MAX_LOG_WEIGHT)."""
    return sequences.sum(log_ratio_T).clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)


@WEIGHTS.register("geometric", _OF_SAMPLES)
def geometric_weight(log_ratio_T: Tensor, sequences: Sequences) -> Tensor:
    """The geometric mean of the ratios of the sample."""
    return sequences.mean(log_ratio_T)


@REJECTIONS.register("none")
def reject_none(kl_T: Tensor, sequences: Sequences, is_outside: IsOutside) -> Tensor:
    """No token."""
    return torch.zeros_like(kl_T, dtype=torch.bool)


@REJECTIONS.register("token")
def reject_tokens(kl_T: Tensor, sequences: Sequences, is_outside: IsOutside) -> Tensor:
    """Tokens, by their own KL."""
    return is_outside(kl_T)


@REJECTIONS.register("sequence", _OF_SAMPLES)
def reject_by_mean(kl_T: Tensor, sequences: Sequences, is_outside: IsOutside) -> Tensor:
    """Samples, by the mean KL of their tokens."""
    return is_outside(sequences.mean(kl_T))


@REJECTIONS.register("sequence_sum", _OF_SAMPLES)
def reject_by_sum(kl_T: Tensor, sequences: Sequences, is_outside: IsOutside) -> Tensor:
    """Samples, by the sum of the KL of their tokens."""
    return is_outside(sequences.sum(kl_T))


@REJECTIONS.register("sequence_max", _OF_SAMPLES)
def reject_by_worst(kl_T: Tensor, sequences: Sequences, is_outside: IsOutside) -> Tensor:
    """Samples with a token outside; a count of these needs no maximum over ranks."""
    return sequences.sum(is_outside(kl_T).to(kl_T.dtype)) > 0


def correction_weights(
    log_ratio_T: Tensor, sequences: Sequences, config: CorrectionConfig
) -> tuple[Tensor, Metrics]:
    """Return (weights_T without gradient, metrics_T).

    log_ratio_T   log old - log rollout, 0 off the loss mask

    Truncated importance sampling (weight=token, bound=truncate): Yao et al., "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training", 2025; IcePop (weight=token, bound=mask,
    low=0.5, high=5): arXiv:2510.18855, section 3.1. Tokens that are left out get weight 0 and still
    count in the denominators of the loss.
    """
    log_ratio_T = log_ratio_T.detach()
    weight_T, is_outside_T = apply_bounds(log_ratio_T, sequences, config)
    metrics = {"correction/weight": weight_T, "correction/bounded_share": is_outside_T.float()}
    if config.normalize:
        of_samples = WEIGHTS.needs(config.weight_name).whole_samples
        mean_T = sequences.batch_mean(weight_T, of_samples=of_samples)
        weight_T = torch.where(mean_T > MIN_NORMALIZER, weight_T / mean_T, weight_T)
        metrics["correction/normalizer"] = mean_T
    if config.reject != "none":
        low, high = config.reject_range
        kl_T = KL_ESTIMATORS[config.reject_estimator](-log_ratio_T)
        is_rejected_T = REJECTIONS[config.reject](
            kl_T, sequences, lambda values_T: (values_T < low) | (values_T > high)
        )
        weight_T = weight_T.masked_fill(is_rejected_T, 0.0)
        metrics["correction/rejected_share"] = is_rejected_T.float()
    return weight_T, metrics


def apply_bounds(
    log_ratio_T: Tensor, sequences: Sequences, config: CorrectionConfig
) -> tuple[Tensor, Tensor]:
    """Return (weights_T within the bounds, bool: which of them were outside)."""
    weight_T = WEIGHTS[config.weight_name](log_ratio_T, sequences).exp()
    is_outside_T = weight_T > config.high
    if config.bound == "truncate":
        return weight_T.clamp(max=config.high), is_outside_T
    is_outside_T |= weight_T < config.low
    return weight_T.masked_fill(is_outside_T, 0.0), is_outside_T


def weights_of_batch(batch: TrainBatch, config: CorrectionConfig) -> Tensor:
    """Return weights_T of a batch with old log-probs that holds its samples whole, neither
    normalized nor 0 where rejected.
    """
    if batch.old_logprobs_T is None or batch.rollout_logprobs_T is None:
        raise ValueError("algorithm.correction needs old log-probs and batch.rollout_logprobs_T")
    mask_T = batch.loss_mask_T
    log_ratio_T = log_ratio(batch.old_logprobs_T, batch.rollout_logprobs_T, mask_T)
    sums = sequence_sum(batch.lens_N, mask_T.device, sample_N=batch.sample_N)
    return apply_bounds(log_ratio_T, Sequences(sums, mask_T), config)[0]
