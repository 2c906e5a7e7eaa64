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
from mcore_rl.config import AlgorithmConfig, CorrectionConfig
from mcore_rl.types import TrainBatch

MAX_LOG_WEIGHT = 20.0
"""Sequence weights stay within exp(+-20): exp(89) is infinite in float32."""


def old_policy(batch: TrainBatch, config: AlgorithmConfig) -> Tensor | None:
    """Return the log-probs that the policy loss compares with; None for a batch on policy."""
    return batch.rollout_logprobs_T if config.correction.bypass else batch.old_logprobs_T


def correction_weights(
    log_ratio_T: Tensor,
    num_tokens_T: Tensor,
    sequence_mean: Callable[[Tensor], Tensor],
    config: CorrectionConfig,
) -> tuple[Tensor, Metrics]:
    """Return (weights_T without gradient, metrics_T).

    log_ratio_T    log old - log rollout, 0 off the loss mask
    num_tokens_T   number of trained tokens in each token's sequence
    sequence_mean  as in loss_tokens.LossTokens

    Truncated importance sampling (weight=token, bound=truncate): Yao et al., "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training", 2025; IcePop (weight=token, bound=mask,
    low=0.5, high=5): arXiv:2510.18855, section 3.1. Tokens that are left out get weight 0 and still
    count in the denominators of the loss.
    """
    log_ratio_T = log_ratio_T.detach()
    if config.weight == "sequence":
        log_weight_T = (sequence_mean(log_ratio_T) * num_tokens_T).clamp(
            -MAX_LOG_WEIGHT, MAX_LOG_WEIGHT
        )
    elif config.weight == "geometric":
        log_weight_T = sequence_mean(log_ratio_T)
    else:
        log_weight_T = log_ratio_T if config.weight == "token" else torch.zeros_like(log_ratio_T)
    weight_T = log_weight_T.exp()
    is_outside_T = weight_T > config.high
    if config.bound == "truncate":
        weight_T = weight_T.clamp(max=config.high)
    else:
        is_outside_T |= weight_T < config.low
        weight_T = weight_T.masked_fill(is_outside_T, 0.0)
    metrics = {"correction/weight": weight_T, "correction/bounded_share": is_outside_T.float()}
    if config.reject != "none":
        kl_T = k3(-log_ratio_T)
        kl_T = sequence_mean(kl_T) if config.reject == "sequence" else kl_T
        is_rejected_T = kl_T > config.reject_above
        weight_T = weight_T.masked_fill(is_rejected_T, 0.0)
        metrics["correction/rejected_share"] = is_rejected_T.float()
    return weight_T, metrics
