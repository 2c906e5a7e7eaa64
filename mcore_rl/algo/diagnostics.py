"""Compares two sets of log-probs of the same tokens, as a log ratio and as metrics per token."""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from mcore_rl.algo.kl import k3
from mcore_rl.algo.loss_tokens import Metrics
from mcore_rl.config import DriftConfig

_log = logging.getLogger(__name__)

MAX_LOG_RATIO = 20.0
"""Ratios stay within exp(+-20), without gradient beyond: exp(89) is infinite in float32."""


def log_ratio(logprobs_T: Tensor, base_logprobs_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return logprobs - base, clamped to +-MAX_LOG_RATIO.

    Masked positions are 0 and have no gradient, even where inputs are NaN.
    """
    difference_T = torch.where(mask_T, logprobs_T - base_logprobs_T, 0.0)
    return difference_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def policy_drift(log_ratio_T: Tensor) -> Metrics:
    """Return the k3 estimate of KL(old || policy) and the importance ratio policy / old."""
    log_ratio_T = log_ratio_T.detach()
    ratio_T = log_ratio_T.exp()
    return {"kl/old_new": k3(-log_ratio_T), "ratio/mean": ratio_T, "ratio/token_max": ratio_T}


def logprob_diff(
    old_logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    mask_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Metrics:
    """Return |trainer - engine| in nats and which ratios of the two leave the clip range."""
    difference_T = torch.where(mask_T, old_logprobs_T - rollout_logprobs_T, 0.0).detach()
    ratio_T = difference_T.exp()
    clipped_T = (ratio_T < 1 - clip_low) | (ratio_T > 1 + clip_high)
    return {
        "logprob_diff/mean": difference_T.abs(),
        "logprob_diff/token_max": difference_T.abs(),
        "logprob_diff/clipped_share": clipped_T.float(),
    }


def attribute_diff(difference_T: Tensor, stale_T: Tensor, router_flips_T: Tensor | None) -> Metrics:
    """Attribute |trainer - engine| of each token to stale, router or arithmetic, which sum to it.

    stale        the token was sampled from older weights
    router       same weights, but in some layer the token before it went to other experts
    arithmetic   the rest: same weights and experts, different kernels or order of operations
    """
    difference_T = difference_T.detach().abs()
    flipped_T = torch.zeros_like(stale_T) if router_flips_T is None else router_flips_T > 0
    router_T = flipped_T & ~stale_T
    metrics = {
        "logprob_diff/stale": torch.where(stale_T, difference_T, 0.0),
        "logprob_diff/arithmetic": torch.where(stale_T | router_T, 0.0, difference_T),
        "logprob_diff/stale_share": stale_T.float(),
    }
    if router_flips_T is not None:
        metrics["logprob_diff/router"] = torch.where(router_T, difference_T, 0.0)
        metrics["logprob_diff/router_flip_share"] = flipped_T.float()
    return metrics


class DriftError(RuntimeError):
    """Log-probs of trainer and engine differ by more than drift.stop_above."""


def check_drift(config: DriftConfig, step: int, metrics: Mapping[str, float]) -> None:
    """Compare this step's mean |trainer - engine| with the recipe's bounds, and name its causes.

    Logs a warning above `drift.warn_above`; raises DriftError above `drift.stop_above`. A bound of
    0 is off.
    """
    mean = metrics.get("logprob_diff/mean")
    if mean is None:  # the policy took no step: its critic is warming up
        return
    parts = {
        name: metrics.get(f"logprob_diff/{name}") for name in ("stale", "router", "arithmetic")
    }
    split = ", ".join(f"{name} {value:.1e}" for name, value in parts.items() if value is not None)
    message = (
        f"step {step}: log-probs of trainer and engine differ by {mean:.1e} nats on average"
        f" ({split})"
    )
    if 0 < config.stop_above < mean:
        raise DriftError(
            f"{message}, more than drift.stop_above={config.stop_above}; see docs/debugging.md"
        )
    if 0 < config.warn_above < mean:
        _log.warning("%s, more than drift.warn_above=%s", message, config.warn_above)
