"""Policy losses per token: log-prob ratios and advantages in, loss_T and metrics_T out, not yet summed.

A recipe's `algorithm.loss` names a maker: AlgorithmConfig in, the loss with its constants bound out.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mcore_rl.algo.registry import Registry
from mcore_rl.config import AlgorithmConfig

Metrics = dict[str, Tensor]
RatioLoss = Callable[[Tensor, Tensor], tuple[Tensor, Metrics]]
"""(log_ratio_T, advantages_T) -> (loss_T, metrics_T), with log_ratio = log policy - log old policy."""

LOSSES: Registry[Callable[[AlgorithmConfig], RatioLoss]] = Registry("algorithm.loss")


@LOSSES.register("ppo_clip")
def make_ppo_clip(config: AlgorithmConfig) -> RatioLoss:
    for name in ("clip_low", "clip_high"):
        if getattr(config, name) < 0:
            raise ValueError(f"algorithm.{name}={getattr(config, name)}: must not be negative")
    return partial(ppo_clip, clip_low=config.clip_low, clip_high=config.clip_high)


def ppo_clip(
    log_ratio_T: Tensor, advantages_T: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Metrics]:
    """-min(w A, clip(w, 1 - clip_low, 1 + clip_high) A) with w = exp(log_ratio).

    PPO, arXiv:1707.06347, eq. 7; per token as in GRPO, arXiv:2402.03300, eq. 3; clip_high > clip_low is
    DAPO's clip-higher, arXiv:2503.14476, section 3.1. A token counts as clipped where its gradient is cut.
    """
    ratio_T = log_ratio_T.exp()
    unclipped_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1 - clip_low, 1 + clip_high)
    loss_T = torch.maximum(unclipped_T, clipped_T)
    ratio_T = ratio_T.detach()
    metrics = {
        "clip/low_share": ((ratio_T < 1 - clip_low) & (advantages_T < 0)).float(),
        "clip/high_share": ((ratio_T > 1 + clip_high) & (advantages_T > 0)).float(),
    }
    return loss_T, metrics
