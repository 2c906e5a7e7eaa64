"""Estimates KL(policy || reference) per token, on samples of the policy, from log_ratio_T.

log_ratio = log policy - log reference. Source: John Schulman, "Approximating KL Divergence",
http://joschu.net/blog/kl-approx.html. A name that ends in "+" has the value of the estimator
without it and the gradient of k2, whose expectation is the gradient of the KL.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from mcore_rl.algo.registry import Registry

KLEstimator = Callable[[Tensor], Tensor]
"""log_ratio_T -> kl_T."""

KL_ESTIMATORS: Registry[KLEstimator] = Registry("algorithm.kl.estimator")


@KL_ESTIMATORS.register("k1")
def k1(log_ratio_T: Tensor) -> Tensor:
    """log_ratio: unbiased, may be negative. Its expected gradient as a loss term is 0: measure
    only.
    """
    return log_ratio_T


@KL_ESTIMATORS.register("k2")
def k2(log_ratio_T: Tensor) -> Tensor:
    """log_ratio^2 / 2: biased, low variance; its expected gradient is the gradient of the KL."""
    return log_ratio_T.square() / 2


@KL_ESTIMATORS.register("k3")
def k3(log_ratio_T: Tensor) -> Tensor:
    """exp(-log_ratio) - 1 + log_ratio: unbiased, never negative; GRPO, arXiv:2402.03300, eq. 4."""
    return (-log_ratio_T).expm1() + log_ratio_T


@KL_ESTIMATORS.register("abs")
def absolute(log_ratio_T: Tensor) -> Tensor:
    """|log_ratio|: a distance between the two, not an estimate of the KL."""
    return log_ratio_T.abs()


def straight_through(estimator: KLEstimator, log_ratio_T: Tensor) -> Tensor:
    """The value of `estimator` with the gradient of k2."""
    slope_T = k2(log_ratio_T)
    return estimator(log_ratio_T).detach() + slope_T - slope_T.detach()


for _name, _estimator in (("k1", k1), ("k3", k3), ("abs", absolute)):
    KL_ESTIMATORS.register(f"{_name}+")(partial(straight_through, _estimator))
