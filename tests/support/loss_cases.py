"""Random tokens for policy losses, and a check of a loss against the published one.

The published loss is a scalar function of padded [N, M] arrays in float64; ours is a loss of
tokens, times weights of the aggregation.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.algo.aggregation import loss_weights
from mcore_rl.algo.lookup import losses
from mcore_rl.algo.registry import LossTokens
from mcore_rl.algo.sequences import sequence_sum
from mcore_rl.config import AlgorithmConfig

LENS = (3, 5, 1, 4, 2, 6)
LOW, HIGH = 0.2, 0.3
FAR = 1.0


@dataclass
class Case:
    """[N, M], padded with zeros; logprobs need a gradient."""

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor
    held_back: Tensor

    @property
    def lens(self) -> Tensor:
        return self.mask.sum(1)

    def mean_of_tokens(self, loss: Tensor) -> Tensor:
        return (loss * self.mask).sum() / self.mask.sum()

    def mean_of_sequences(self, loss: Tensor) -> Tensor:
        return ((loss * self.mask).sum(1) / self.lens).mean()


def make_case(spread: float = FAR) -> Case:
    generator = torch.Generator().manual_seed(7)
    mask = torch.arange(max(LENS)) < torch.tensor(LENS)[:, None]
    noise, old = torch.randn(2, *mask.shape, generator=generator, dtype=torch.float64)
    old = -old.abs() - 0.3
    logprobs = (old + spread * noise).clamp(max=-0.01)
    advantages = torch.tensor([1.5, -0.7, 0.0, -2.0, -1.0, 0.5], dtype=torch.float64)[
        :, None
    ].expand(mask.shape)
    held_back = (torch.rand(mask.shape, generator=generator) < 0.4) & mask
    return Case((logprobs * mask).requires_grad_(), old * mask, advantages * mask, mask, held_back)


def surrogate(ratio: Tensor, advantages: Tensor) -> Tensor:
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - LOW, 1 + HIGH) * advantages)


def our_loss(case: Case, config: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The same tokens laid end to end, summed with the weights of the recipe's aggregation."""
    mask, lens = case.mask, LENS
    sums = sequence_sum(lens, torch.device("cpu"))
    num_tokens_T = torch.tensor(lens).repeat_interleave(torch.tensor(lens))
    tokens = LossTokens(
        logprobs_T=case.logprobs[mask],
        log_ratio_T=(case.logprobs - case.old)[mask],
        advantages_T=case.advantages[mask],
        sequence_mean=lambda values_T: sums(values_T) / num_tokens_T,
        sequence_sum=sums,
        held_back_T=case.held_back[mask],
    )
    loss_T, metrics = losses[config.loss](config)(tokens)
    weights_T = loss_weights(config.aggregation, torch.ones(sum(lens), dtype=torch.bool), lens)
    return (loss_T * weights_T).sum(), metrics


def check_published(
    published: Callable[[Case], Tensor], config: AlgorithmConfig, spread: float
) -> None:
    """Assert that value and gradient are those of the published loss."""
    case = make_case(spread)
    loss, metrics = our_loss(case, config)
    expected = published(case)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-7)
    (gradient,) = torch.autograd.grad(loss, case.logprobs)
    (wanted,) = torch.autograd.grad(expected, case.logprobs)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-7)
    assert not any(value.requires_grad for value in metrics.values())


def check_bounds(config: AlgorithmConfig) -> None:
    """Assert that some tokens meet each bound that the loss has a metric of."""
    _, metrics = our_loss(make_case(), config)
    for metric, value in metrics.items():
        assert 0 < value.sum() < len(value), metric


def check_on_policy(config: AlgorithmConfig, weights: Tensor) -> None:
    """Assert that where policy and old policy agree, the gradient is minus advantage * weight."""
    case = make_case(0.0)
    (gradient,) = torch.autograd.grad(our_loss(case, config)[0], case.logprobs)
    torch.testing.assert_close(gradient, -case.advantages * weights, rtol=1e-5, atol=1e-7)
