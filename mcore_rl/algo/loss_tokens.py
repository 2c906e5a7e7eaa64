"""The input of a policy loss: the tokens of one micro-batch on one rank."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Metrics = dict[str, Tensor]
"""Detached values of each token by metric name."""


@dataclass(frozen=True)
class LossTokens:
    """The tokens of a micro-batch on one rank.

    logprobs_T, log_ratio_T   with gradient; 0 off the loss mask
    advantages_T              0 off the loss mask
    sequence_mean, sequence_sum
                              take values_T and return, at each token, their mean or sum over the
                              trained tokens of the whole sample, whatever rows, micro-batches and
                              ranks these lie in; without gradient; need Needs.whole_samples
    held_back_T               bool, tokens chosen by algo/covariance.py; None unless the loss needs
                              them
    """

    logprobs_T: Tensor
    log_ratio_T: Tensor
    advantages_T: Tensor
    sequence_mean: Callable[[Tensor], Tensor]
    sequence_sum: Callable[[Tensor], Tensor]
    held_back_T: Tensor | None = None
