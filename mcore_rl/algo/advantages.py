"""Rewards of grouped samples in, one advantage per sample out. One function per algorithm.

Axes: N samples. group_N holds one id per sample, equal for the samples of one prompt, in any order.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mcore_rl.algo.registry import Registry

Advantage = Callable[[Tensor, Tensor], Tensor]
"""(rewards_N, group_N) -> advantages_N float32."""

ADVANTAGES: Registry[Advantage] = Registry("algorithm.advantage")

STD_EPS = 1e-6
"""Added to the group's standard deviation."""


@ADVANTAGES.register("grpo")
def grpo(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-6) within each group; GRPO, arXiv:2402.03300, section 4.1.2.

    std is the sample standard deviation (divided by G - 1). A group of one, or of equal rewards, gets 0.
    """
    centered_N, group_index_N, num_samples_G = _center(rewards_N, group_N)
    squares_G = torch.zeros_like(num_samples_G).index_add_(0, group_index_N, centered_N.square())
    std_G = (squares_G / (num_samples_G - 1).clamp(min=1)).sqrt()
    return (centered_N / (std_G + STD_EPS)[group_index_N]).float()


@ADVANTAGES.register("dr_grpo")
def dr_grpo(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """A_i = r_i - mean(r) within each group; Dr. GRPO, arXiv:2503.20783, section 3.2."""
    return _center(rewards_N, group_N)[0].float()


def _center(rewards_N: Tensor, group_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float64 rewards minus their group's mean, the group index of each sample, the samples per group.

    Equal rewards come out as exactly 0, not as rounding errors that a division by 1e-6 would blow up.
    """
    if rewards_N.ndim != 1 or rewards_N.shape != group_N.shape:
        raise ValueError(
            f"rewards {tuple(rewards_N.shape)} and groups {tuple(group_N.shape)} must both be [N]"
        )
    if not rewards_N.isfinite().all():
        bad = rewards_N.isfinite().logical_not().nonzero()[:, 0].tolist()
        raise ValueError(f"rewards of samples {bad[:8]} are not finite")
    rewards_N = rewards_N.double()
    _, group_index_N, counts_G = group_N.unique(return_inverse=True, return_counts=True)
    num_samples_G = counts_G.double()
    lowest_G = torch.full_like(num_samples_G, torch.inf)
    lowest_G = lowest_G.scatter_reduce(0, group_index_N, rewards_N, "amin")
    above_N = rewards_N - lowest_G[group_index_N]  # exactly 0 where all are equal
    mean_above_G = torch.zeros_like(num_samples_G).index_add_(0, group_index_N, above_N) / num_samples_G
    return above_N - mean_above_G[group_index_N], group_index_N, num_samples_G
