"""Turns log-probs of engine and trainer into importance weights of the sampled tokens.

There are three policies: the engine's (rollout), the trainer's with the same or newer weights
(old), and the one being trained. The policy loss corrects for policy / old, and these weights
correct for old / rollout (decoupled PPO, arXiv:2110.00641, eq. 11).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mcore_rl.algo.kl import k3
from mcore_rl.algo.loss_tokens import Metrics
from mcore_rl.algo.registry import Needs, Registry
from mcore_rl.algo.sequences import Sequences
from mcore_rl.config import AlgorithmConfig, CorrectionConfig
from mcore_rl.types import TrainBatch

MAX_LOG_WEIGHT = 20.0
"""Sequence weights stay within exp(+-20): exp(89) is infinite in float32."""
_OF_SAMPLES = Needs(whole_samples=True)

OfTokens = Callable[[Tensor, Sequences], Tensor]
"""(values_T, sums over samples) -> a number at each token."""

WEIGHTS: Registry[OfTokens] = Registry("algorithm.correction.weight")
"""log_ratio_T -> log_weight_T."""
REJECTIONS: Registry[OfTokens] = Registry("algorithm.correction.reject")
"""kl_T -> what `reject_above` is compared with."""


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
def reject_none(kl_T: Tensor, sequences: Sequences) -> Tensor:
    """0."""
    return torch.zeros_like(kl_T)


@REJECTIONS.register("token")
def reject_tokens(kl_T: Tensor, sequences: Sequences) -> Tensor:
    """The token's own KL."""
    return kl_T


@REJECTIONS.register("sequence", _OF_SAMPLES)
def reject_sequences(kl_T: Tensor, sequences: Sequences) -> Tensor:
    """The mean KL of the sample's tokens."""
    return sequences.mean(kl_T)


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
    weight_T = WEIGHTS[config.weight_name](log_ratio_T, sequences).exp()
    is_outside_T = weight_T > config.high
    if config.bound == "truncate":
        weight_T = weight_T.clamp(max=config.high)
    else:
        is_outside_T |= weight_T < config.low
        weight_T = weight_T.masked_fill(is_outside_T, 0.0)
    metrics = {"correction/weight": weight_T, "correction/bounded_share": is_outside_T.float()}
    if config.reject != "none":
        is_rejected_T = REJECTIONS[config.reject](k3(-log_ratio_T), sequences) > config.reject_above
        weight_T = weight_T.masked_fill(is_rejected_T, 0.0)
        metrics["correction/rejected_share"] = is_rejected_T.float()
    return weight_T, metrics
