"""Which tokens of a mini-batch Clip-Cov and KL-Cov hold back: advantages and old log-probs in, a mask out.

Computed once for the whole mini-batch, so that it does not depend on how the batch is spread over ranks. The
published code takes the current log-probs of each micro-batch; in the first mini-batch of a rollout those are
the old ones.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mcore_rl.algo.build import old_policy
from mcore_rl.config import AlgorithmConfig, CovarianceConfig
from mcore_rl.types import TrainBatch

Pick = Callable[[Tensor, CovarianceConfig, int], Tensor]
"""(covariance_R of the trained tokens, options, seed) -> indices of those held back."""


def with_held_back(batch: TrainBatch, config: AlgorithmConfig, seed: int) -> TrainBatch:
    """The mini-batch with `held_back_T`, if the loss of `config` needs it."""
    pick = PICKS.get(config.loss)
    if pick is None:
        return batch
    old_logprobs_T = old_policy(batch, config)
    if old_logprobs_T is None or batch.advantages_T is None:
        raise ValueError(f"algorithm.loss={config.loss} needs old log-probs and advantages")
    trained = batch.loss_mask_T.nonzero()[:, 0]
    covariance_R = covariance(batch.advantages_T[trained], old_logprobs_T[trained])
    held_back_T = torch.zeros_like(batch.loss_mask_T)
    held_back_T[trained[pick(covariance_R, config.covariance, seed)]] = True
    return replace(batch, held_back_T=held_back_T)


def covariance(advantages_R: Tensor, logprobs_R: Tensor) -> Tensor:
    """(A - mean A) (log p - mean log p) of each token, float64; arXiv:2505.22617, eq. 10."""
    advantages_R, logprobs_R = advantages_R.double(), logprobs_R.double()
    return (advantages_R - advantages_R.mean()) * (logprobs_R - logprobs_R.mean())


def pick_between(covariance_R: Tensor, config: CovarianceConfig, seed: int) -> Tensor:
    """A random share of all tokens, out of those between `low` and `high`; at least one if there is one."""
    candidates = ((covariance_R > config.low) & (covariance_R < config.high)).nonzero()[:, 0]
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    return candidates[order[: _how_many(covariance_R, config)]]


def pick_largest(covariance_R: Tensor, config: CovarianceConfig, seed: int) -> Tensor:
    """The share of the tokens that has the largest covariance, at least one."""
    return covariance_R.topk(min(_how_many(covariance_R, config), len(covariance_R))).indices


def _how_many(covariance_R: Tensor, config: CovarianceConfig) -> int:
    return max(int(config.share * len(covariance_R)), 1)


PICKS: dict[str, Pick] = {"clip_cov": pick_between, "kl_cov": pick_largest}
"""By algorithm.loss."""
