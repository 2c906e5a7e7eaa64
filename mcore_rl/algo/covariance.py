"""Chooses the tokens that Clip-Cov and KL-Cov hold back, by their advantages and old log-probs.

The mask is computed once for the whole mini-batch, so it does not depend on how the batch is spread
over ranks. The published code uses the current log-probs of each micro-batch; in the first
mini-batch of a rollout these are the old ones.
"""

from dataclasses import replace

import torch
from torch import Tensor

from mcore_rl.algo.correction import old_policy
from mcore_rl.algo.registry import Pick
from mcore_rl.algo.sequences import order_trained_tokens
from mcore_rl.config import AlgorithmConfig, CovarianceConfig
from mcore_rl.types import TrainBatch


def with_held_back(
    batch: TrainBatch, config: AlgorithmConfig, pick: Pick, seed: int
) -> tuple[TrainBatch, dict[str, float]]:
    """Return (the mini-batch with `held_back_T`, no metrics); `pick` is Needs.held_back."""
    old_logprobs_T = old_policy(batch, config)
    if old_logprobs_T is None or batch.advantages_T is None:
        raise ValueError(f"algorithm.loss={config.loss} needs old log-probs and advantages")
    trained = order_trained_tokens(batch)  # so that chance picks the same tokens in any rows
    covariance_R = covariance(batch.advantages_T[trained], old_logprobs_T[trained])
    held_back_T = torch.zeros_like(batch.loss_mask_T)
    held_back_T[trained[pick(covariance_R, config.covariance, seed)]] = True
    return replace(batch, held_back_T=held_back_T), {}


def covariance(advantages_R: Tensor, logprobs_R: Tensor) -> Tensor:
    """(A - mean A) (log p - mean log p) of each token, float64; arXiv:2505.22617, eq. 10."""
    advantages_R = advantages_R.double()
    logprobs_R = logprobs_R.double()
    return (advantages_R - advantages_R.mean()) * (logprobs_R - logprobs_R.mean())


def pick_between(covariance_R: Tensor, config: CovarianceConfig, seed: int) -> Tensor:
    """Clip-Cov: random tokens whose covariance lies between `low` and `high`.

    Their number is at most `share` of all tokens. At least one token is picked if there is a
    candidate.
    """
    candidates = ((covariance_R > config.low) & (covariance_R < config.high)).nonzero()[:, 0]
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    return candidates[order[: _num_picked(covariance_R, config)]]


def pick_largest(covariance_R: Tensor, config: CovarianceConfig, seed: int) -> Tensor:
    """KL-Cov: the `share` of the tokens with the largest covariance, at least one."""
    num_picked = min(_num_picked(covariance_R, config), len(covariance_R))
    return covariance_R.topk(num_picked).indices


def _num_picked(covariance_R: Tensor, config: CovarianceConfig) -> int:
    return max(int(config.share * len(covariance_R)), 1)
