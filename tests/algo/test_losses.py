"""Policy losses against the published ones, computed on padded [N, M] arrays in float64: value and
gradient.

The references are whole scalar losses; ours are token losses times aggregation weights.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from mcore_rl.algo.aggregation import loss_weights
from mcore_rl.algo.choice import losses
from mcore_rl.algo.loss_tokens import LossTokens
from mcore_rl.algo.losses import clipped_surrogate
from mcore_rl.algo.sequences import sequence_sum
from mcore_rl.config import AlgorithmConfig, CovarianceConfig

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


def ppo_clip(c: Case) -> Tensor:
    return c.mean_of_tokens(surrogate((c.logprobs - c.old).exp(), c.advantages))


def dual_clip(c: Case) -> Tensor:
    ratio = (c.logprobs - c.old).exp()
    objective = torch.minimum(ratio * c.advantages, ratio.clamp(1 - LOW, 1 + HIGH) * c.advantages)
    bounded = torch.maximum(objective, 1.5 * c.advantages)
    return -c.mean_of_tokens(torch.where(c.advantages < 0, bounded, objective))


def gspo(c: Case) -> Tensor:
    """GSPO, eq. 5 and 7: one ratio and one clip per sequence."""
    ratio = (((c.logprobs - c.old) * c.mask).sum(1) / c.lens).exp()
    return surrogate(ratio, c.advantages[:, 0]).mean()


def gmpo(c: Case) -> Tensor:
    """GMPO, eq. 4: the product of clipped ratios to the power of one over the length."""
    means = []
    for i, n in enumerate(LENS):
        product = torch.ones((), dtype=torch.float64)
        for t in range(n):
            ratio = (c.logprobs - c.old)[i, t].exp()
            clipped = ratio.clamp(math.exp(-LOW), math.exp(HIGH))
            product = product * (torch.minimum if c.advantages[i, t] > 0 else torch.maximum)(
                ratio, clipped
            )
        means.append(product ** (1 / n))
    return -(c.advantages[:, 0] * torch.stack(means)).mean()


def cispo(c: Case) -> Tensor:
    weight = (c.logprobs - c.old).exp().clamp(1 - LOW, 1 + HIGH).detach()
    return c.mean_of_tokens(-weight * c.advantages * c.logprobs)


def sapo(c: Case) -> Tensor:
    ratio = (c.logprobs - c.old).exp()
    tau = torch.where(c.advantages > 0, 1.2, 1.7).double()
    gate = 4 / tau / (1 + (-tau * (ratio - 1)).exp())
    return c.mean_of_sequences(-gate * c.advantages)


def policy_gradient(c: Case) -> Tensor:
    return c.mean_of_tokens(-c.advantages * c.logprobs)


def dppo(c: Case, distance: Tensor) -> Tensor:
    p, q = c.logprobs.exp(), c.old.exp()
    keep_up, keep_down = (distance <= HIGH) | (p <= q), (distance <= LOW) | (p >= q)
    valid = torch.where(c.advantages > 0, keep_up, keep_down).double()
    weight = (c.logprobs - c.old).exp().clamp(max=1.4)
    return c.mean_of_tokens(-c.advantages * (weight * valid).detach() * c.logprobs)


def dppo_tv(c: Case) -> Tensor:
    return dppo(c, (c.logprobs.exp() - c.old.exp()).abs())


def dppo_kl(c: Case) -> Tensor:
    p, q = c.logprobs.exp(), c.old.exp()
    return dppo(c, q * (q / p).log() + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log())


def clip_cov(c: Case) -> Tensor:
    return c.mean_of_tokens(surrogate((c.logprobs - c.old).exp(), c.advantages) * ~c.held_back)


def kl_cov(c: Case) -> Tensor:
    difference = c.logprobs - c.old
    return c.mean_of_tokens(-difference.exp() * c.advantages + 0.7 * difference.abs() * c.held_back)


CONFIG = AlgorithmConfig(
    clip_low=LOW,
    clip_high=HIGH,
    tau_positive=1.2,
    tau_negative=1.7,
    max_ratio=1.4,
    covariance=CovarianceConfig(kl_coef=0.7),
)
REFERENCES: dict[str, tuple[Callable[[Case], Tensor], AlgorithmConfig]] = {
    "ppo_clip": (ppo_clip, CONFIG),
    "dual_clip": (dual_clip, replace(CONFIG, dual_clip=1.5)),
    "gspo": (gspo, replace(CONFIG, loss="gspo", aggregation="sequence_mean")),
    "gmpo": (gmpo, replace(CONFIG, loss="gmpo", aggregation="sequence_mean")),
    "cispo": (cispo, replace(CONFIG, loss="cispo")),
    "sapo": (sapo, replace(CONFIG, loss="sapo", aggregation="sequence_mean")),
    "policy_gradient": (policy_gradient, replace(CONFIG, loss="policy_gradient")),
    "dppo_tv": (dppo_tv, replace(CONFIG, loss="dppo_tv")),
    "dppo_kl": (dppo_kl, replace(CONFIG, loss="dppo_kl")),
    "clip_cov": (clip_cov, replace(CONFIG, loss="clip_cov")),
    "kl_cov": (kl_cov, replace(CONFIG, loss="kl_cov")),
}


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
        held_back_T=case.held_back[mask],
    )
    loss_T, metrics = losses[config.loss](config)(tokens)
    weights_T = loss_weights(config.aggregation, torch.ones(sum(lens), dtype=torch.bool), lens)
    return (loss_T * weights_T).sum(), metrics


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("spread", [FAR, 0.02], ids=["far", "near"])
def test_value_and_gradient_are_those_of_the_published_loss(name: str, spread: float) -> None:
    reference, config = REFERENCES[name]
    case = make_case(spread)
    loss, metrics = our_loss(case, config)
    expected = reference(case)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-7)
    (gradient,) = torch.autograd.grad(loss, case.logprobs)
    (wanted,) = torch.autograd.grad(expected, case.logprobs)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-7)
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("name", REFERENCES)
def test_far_from_the_old_policy_the_bounds_of_each_loss_take_hold(name: str) -> None:
    """Else the test above would pass without them."""
    _, metrics = our_loss(make_case(), REFERENCES[name][1])
    for metric, value in metrics.items():
        assert 0 < value.sum() < len(value), metric


def test_every_loss_has_a_reference() -> None:
    assert losses.names == sorted({config.loss for _, config in REFERENCES.values()})


RATIOS = [0.2, 0.79, 0.81, 1.0, 1.29, 1.31, 4.0]
CASES = [(ratio, advantage) for ratio in RATIOS for advantage in (-1.5, 0.0, 2.0)]


def clip_table(ratio: float, advantage: float) -> tuple[float, float]:
    """(loss, d loss / d log ratio)."""
    if advantage > 0 and ratio > 1 + HIGH:
        return -(1 + HIGH) * advantage, 0.0
    if advantage < 0 and ratio < 1 - LOW:
        return -(1 - LOW) * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


def test_the_clip_case_by_case() -> None:
    log_ratio_T = torch.tensor(
        [math.log(r) for r, _ in CASES], dtype=torch.float64, requires_grad=True
    )
    advantages_T = torch.tensor([a for _, a in CASES], dtype=torch.float64)
    loss_T, metrics = clipped_surrogate(log_ratio_T, advantages_T, LOW, HIGH)
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), log_ratio_T)
    expected = torch.tensor([clip_table(*case) for case in CASES], dtype=torch.float64)
    torch.testing.assert_close(loss_T.detach(), expected[:, 0])
    torch.testing.assert_close(gradient_T, expected[:, 1])
    assert [r for (r, _), low in zip(CASES, metrics["clip/low_share"], strict=True) if low] == [
        0.2,
        0.79,
    ]
    assert [r for (r, _), high in zip(CASES, metrics["clip/high_share"], strict=True) if high] == [
        1.31,
        4.0,
    ]


@pytest.mark.parametrize("name", sorted(set(REFERENCES) - {"kl_cov", "clip_cov"}))
def test_on_policy_the_gradient_is_the_policy_gradient(name: str) -> None:
    case = make_case(0.0)
    (gradient,) = torch.autograd.grad(our_loss(case, REFERENCES[name][1])[0], case.logprobs)
    by_tokens = REFERENCES[name][1].aggregation == "token_mean"
    weights = (
        case.mask / case.mask.sum() if by_tokens else case.mask / case.lens[:, None] / len(LENS)
    )
    torch.testing.assert_close(gradient, -case.advantages * weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "loss", ["ppo_clip", "gspo", "gmpo", "cispo", "dppo_tv", "dppo_kl", "clip_cov"]
)
def test_a_negative_clip_is_refused(loss: str) -> None:
    with pytest.raises(ValueError, match=r"algorithm.clip_high=-0.1"):
        losses[loss](AlgorithmConfig(clip_high=-0.1))


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"algorithm.dual_clip=0.5: must be greater than 1, or be 0"
    ):
        AlgorithmConfig(dual_clip=0.5)
    with pytest.raises(ValueError, match=r"algorithm.gamma=1.5"):
        AlgorithmConfig(gamma=1.5)
    with pytest.raises(ValueError, match=r"algorithm.tau_negative"):
        AlgorithmConfig(tau_negative=0.0)
