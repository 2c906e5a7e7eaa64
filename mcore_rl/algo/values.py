"""Computes advantages, returns and the critic's loss from rewards and values of tokens.

Axes: N samples, R response tokens of all samples end to end.
"""

import torch
from torch import Tensor

from mcore_rl.algo.moments import Moments
from mcore_rl.algo.outcomes import Outcomes, discount_
from mcore_rl.algo.registry import Metrics
from mcore_rl.types import TrainBatch


def estimate_gae(outcomes: Outcomes, gamma: float, lam: float) -> Tensor:
    """float64 [R]: A_t = delta_t + gamma lam A_(t+1), delta_t = r_t + gamma V_(t+1) - V_t.

    Generalized advantage estimation, arXiv:1506.02438, eq. 16. A_(t+1) is 0 at the last token, and
    so is V_(t+1) but for samples with `last_values_N`: a bound that cut them off is not an end of
    their task (partial-episode bootstrapping, arXiv:1712.00378, section 3, eq. 6). A_t + V_t is the
    return that the critic learns. Raises ValueError without a critic's values.
    """
    if outcomes.values_R is None:
        raise ValueError("algorithm.advantage=gae needs a critic's values")
    values_R = outcomes.values_R.double()
    next_R = values_R.roll(-1)
    with_tokens, last = outcomes.last_tokens()
    next_R[last] = 0.0
    if outcomes.last_values_N is not None:
        next_R[last] = outcomes.last_values_N.double()[with_tokens]
    deltas_R = outcomes.rewards_R.sub_(values_R).add_(next_R, alpha=gamma)
    return discount_(deltas_R, outcomes.lens_N, gamma * lam)


def value_loss(values_T: Tensor, batch: TrainBatch, *, clip: float) -> tuple[Tensor, Metrics]:
    """Return (max((V - R)^2, (V_clipped - R)^2) / 2 of each token, metrics_T).

    V_clipped is V held within `clip` of the value before the step; `clip` 0 leaves V unclipped.
    PPO's clipped value loss: openai/baselines, ppo2/model.py; arXiv:2005.12729, section 3, item 1.
    Tokens off the loss mask do not affect loss, gradient or metrics.
    """
    if batch.values_T is None or batch.returns_T is None:
        raise ValueError("value_loss needs batch.values_T and batch.returns_T")
    mask_T = batch.loss_mask_T
    values_T = torch.where(mask_T, values_T, 0.0)
    old_T = torch.where(mask_T, batch.values_T, 0.0)
    returns_T = torch.where(mask_T, batch.returns_T, 0.0)
    squared_T = (values_T - returns_T).square()
    clipped_T = torch.zeros_like(mask_T)
    if clip:
        within_T = old_T + (values_T - old_T).clamp(-clip, clip)
        squared_clipped_T = (within_T - returns_T).square()
        clipped_T = squared_clipped_T > squared_T
        squared_T = torch.maximum(squared_T, squared_clipped_T)
    metrics = {
        "value": values_T.detach(),
        "return": returns_T,
        "error": (values_T - returns_T).abs().detach(),
        "clipped_share": clipped_T.float(),
    }
    return 0.5 * squared_T, metrics


def explained_variance(errors: Moments, returns: Moments) -> float:
    """1 - var(R - V) / var(R): 1 for a perfect critic, 0 for one that does no better than a
    constant.

    0 for fewer than two returns, or if all are equal. `errors` are those of R - V.
    """
    if not returns.variance > 0:
        return 0.0
    return 1 - errors.variance / returns.variance
