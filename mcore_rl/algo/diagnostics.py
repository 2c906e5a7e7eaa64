"""Two sets of log-probs of the same tokens in; their ratio, and metrics_T of how far they are apart, out."""

import torch
from torch import Tensor

from mcore_rl.algo.kl import k3
from mcore_rl.algo.losses import Metrics

MAX_LOG_RATIO = 20.0
"""Ratios are held within exp(+-20), without gradient beyond: exp(89) is infinite in float32."""


def log_ratio(logprobs_T: Tensor, base_logprobs_T: Tensor, mask_T: Tensor) -> Tensor:
    """logprobs - base within +-MAX_LOG_RATIO, 0 without gradient off the mask, whatever stands there."""
    difference_T = torch.where(mask_T, logprobs_T - base_logprobs_T, 0.0)
    return difference_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def policy_drift(log_ratio_T: Tensor) -> Metrics:
    """Policy against the old policy that sampled: k3 of KL(old || policy), importance ratio."""
    log_ratio_T = log_ratio_T.detach()
    ratio_T = log_ratio_T.exp()
    return {"kl/old_new": k3(-log_ratio_T), "ratio/mean": ratio_T, "ratio/token_max": ratio_T}


def logprob_diff(
    old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, mask_T: Tensor, *, clip_low: float, clip_high: float
) -> Metrics:
    """Trainer against engine on the same weights: |difference| in nats; ratios outside the clip range."""
    difference_T = torch.where(mask_T, old_logprobs_T - rollout_logprobs_T, 0.0).detach()
    ratio_T = difference_T.exp()
    clipped_T = (ratio_T < 1 - clip_low) | (ratio_T > 1 + clip_high)
    return {
        "logprob_diff/mean": difference_T.abs(),
        "logprob_diff/token_max": difference_T.abs(),
        "logprob_diff/clipped_share": clipped_T.float(),
    }
