"""Compares two sets of log-probs of the same tokens, as a log ratio and as metrics per token."""

import logging
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from mcore_rl.algo.kl import k3
from mcore_rl.algo.registry import Metrics
from mcore_rl.config import DriftConfig

_log = logging.getLogger(__name__)

WARN_ABOVE = {"float32": 1e-3, "bfloat16": 0.03, "fp8": 0.15, "int4": 0.15}
STOP_ABOVE = {"float32": 0.01, "bfloat16": 0.3, "fp8": 0.5, "int4": 0.5}
"""Defaults of drift.warn_above and drift.stop_above by what engines hold, in nats. On a GPU, right
weights differed by up to 0.015 in bfloat16 and 0.072 in fp8: twice that is warned of. INT4 was not
measured on one. At the second bound, a policy is another policy.
"""

MIN_FRESH_TOKENS = 256
"""With fewer tokens of the weights that train, one that a router sends elsewhere can raise their
mean above any bound.
"""
STALE_FACTOR = 5.0
STALE_LEAST = {"warn_above": 0.1, "stop_above": 0.3}
"""Where there are fewer, the mean over all tokens may be so many times the bound, or the least by
option. Stale tokens differ as far as the policy moved, whatever engines compute in.
"""

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
    """Log-probs of trainer and engine differ by more than drift.stop_above, or by a NaN."""


def check_drift(
    config: DriftConfig, precision: str, step: int, metrics: Mapping[str, float]
) -> None:
    """Compare this step's mean |trainer - engine| with the recipe's bounds, and name its causes.

    The mean is over tokens of the weights that train; if these are fewer than MIN_FRESH_TOKENS, it
    is over all tokens, and wider bounds count. Logs a warning above `drift.warn_above`; raises
    DriftError above `drift.stop_above`, and in any case if the mean is not finite. A bound of 0 is
    off, None is that of the `precision` of engines: model.dtype, or fp8.
    """
    overall = metrics.get("logprob_diff/mean")
    if overall is None:  # the policy takes no step because its critic is warming up
        return
    fresh = _mean_of_fresh(overall, metrics)
    mean = overall if fresh is None else fresh
    warn_above = find_warn_bound(config, precision)
    stop_above = STOP_ABOVE[precision] if config.stop_above is None else config.stop_above
    which = "tokens of the weights that train"
    if fresh is None:
        which = f"all tokens, fewer than {MIN_FRESH_TOKENS} of them of the weights that train"
        warn_above = find_warn_bound(config, precision, is_stale=True)
        stop_above = _widen(stop_above, STALE_LEAST["stop_above"])
    message = (
        f"step {step}: log-probs of trainer and engine differ by {mean:.1e} nats on average over"
        f" {which} (over all tokens: {_split(metrics)})"
    )
    if not math.isfinite(overall):
        raise DriftError(
            f"{message}, which ends a run whatever drift.stop_above is; see"
            " docs/debugging.md#weights"
        )
    if 0 < stop_above < mean:
        raise DriftError(
            f"{message}, more than {_name('stop_above', stop_above, fresh)}; see"
            " docs/debugging.md#weights"
        )
    if 0 < warn_above < mean:
        _log.warning("%s, more than %s", message, _name("warn_above", warn_above, fresh))


def find_warn_bound(config: DriftConfig, precision: str, *, is_stale: bool = False) -> float:
    """Return the mean |trainer - engine| in nats above which a step is warned of; 0: none is.

    is_stale   the mean is over tokens of older weights, too
    """
    bound = WARN_ABOVE[precision] if config.warn_above is None else config.warn_above
    return _widen(bound, STALE_LEAST["warn_above"]) if is_stale else bound


def _mean_of_fresh(overall: float, metrics: Mapping[str, float]) -> float | None:
    """Return the mean difference over tokens that are not stale; None if they are too few."""
    fresh_share = 1 - metrics.get("logprob_diff/stale_share", 0.0)
    num_tokens = metrics["rollout/samples"] * metrics["rollout/response_len"]
    if round(fresh_share * num_tokens) < MIN_FRESH_TOKENS:
        return None
    return (overall - metrics.get("logprob_diff/stale", 0.0)) / fresh_share


def _widen(bound: float, least: float) -> float:
    """Return the bound for stale tokens; 0, which is off, stays 0."""
    return STALE_FACTOR * max(bound, least) if bound > 0 else 0.0


def _name(option: str, bound: float, fresh: float | None) -> str:
    if fresh is not None:
        return f"drift.{option}={bound:g}"
    return f"{bound:g} (drift.{option}, widened: docs/async.md#details)"


def _split(metrics: Mapping[str, float]) -> str:
    """Return the parts of the mean by their causes, as far as these are known."""
    parts = {
        name: metrics.get(f"logprob_diff/{name}") for name in ("stale", "router", "arithmetic")
    }
    return ", ".join(f"{name} {value:.1e}" for name, value in parts.items() if value is not None)
