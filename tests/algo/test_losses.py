"""Policy losses of tokens against the published ones: value, gradient and bounds."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mcore_rl.algo.lookup import losses
from mcore_rl.algo.losses import clipped_surrogate
from mcore_rl.config import AlgorithmConfig, CovarianceConfig
from tests.algo.test_sequence_losses import REFERENCES as REFERENCES_OF_SEQUENCES
from tests.support.loss_cases import (
    FAR,
    HIGH,
    LOW,
    Case,
    check_bounds,
    check_on_policy,
    check_published,
    make_case,
    surrogate,
)


def ppo_clip(c: Case) -> Tensor:
    return c.mean_of_tokens(surrogate((c.logprobs - c.old).exp(), c.advantages))


def dual_clip(c: Case) -> Tensor:
    ratio = (c.logprobs - c.old).exp()
    objective = torch.minimum(ratio * c.advantages, ratio.clamp(1 - LOW, 1 + HIGH) * c.advantages)
    bounded = torch.maximum(objective, 1.5 * c.advantages)
    return -c.mean_of_tokens(torch.where(c.advantages < 0, bounded, objective))


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


def dro(c: Case) -> Tensor:
    """verl and Tinker: the log-prob's part, and the square of its distance from the old one."""
    reward_part = c.logprobs * c.advantages
    return -c.mean_of_tokens(reward_part - 0.5 * 0.3 * (c.logprobs - c.old) ** 2)


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
    dro_beta=0.3,
    covariance=CovarianceConfig(kl_coef=0.7),
)
REFERENCES: dict[str, tuple[Callable[[Case], Tensor], AlgorithmConfig]] = {
    "ppo_clip": (ppo_clip, CONFIG),
    "dual_clip": (dual_clip, replace(CONFIG, dual_clip=1.5)),
    "cispo": (cispo, replace(CONFIG, loss="cispo")),
    "sapo": (sapo, replace(CONFIG, loss="sapo", aggregation="sequence_mean")),
    "policy_gradient": (policy_gradient, replace(CONFIG, loss="policy_gradient")),
    "dro": (dro, replace(CONFIG, loss="dro")),
    "dppo_tv": (dppo_tv, replace(CONFIG, loss="dppo_tv")),
    "dppo_kl": (dppo_kl, replace(CONFIG, loss="dppo_kl")),
    "clip_cov": (clip_cov, replace(CONFIG, loss="clip_cov")),
    "kl_cov": (kl_cov, replace(CONFIG, loss="kl_cov")),
}


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("spread", [FAR, 0.02], ids=["far", "near"])
def test_value_and_gradient_are_those_of_the_published_loss(name: str, spread: float) -> None:
    check_published(*REFERENCES[name], spread)


@pytest.mark.parametrize("name", REFERENCES)
def test_far_from_the_old_policy_the_bounds_of_each_loss_take_hold(name: str) -> None:
    """Else the test above would pass without them."""
    check_bounds(REFERENCES[name][1])


def test_every_loss_has_a_reference() -> None:
    here = {config.loss for _, config in REFERENCES.values()}
    assert losses.names == sorted(here | set(REFERENCES_OF_SEQUENCES))


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
    mask = make_case().mask
    weights = mask / mask.sum()
    if REFERENCES[name][1].aggregation == "sequence_mean":
        weights = mask / mask.sum(1, keepdim=True) / len(mask)
    check_on_policy(REFERENCES[name][1], weights)


@pytest.mark.parametrize(
    "loss", ["ppo_clip", "gspo", "luspo", "gmpo", "cispo", "dppo_tv", "dppo_kl", "clip_cov"]
)
def test_a_negative_clip_is_refused(loss: str) -> None:
    with pytest.raises(ValueError, match=r"algorithm.clip_high=-0.1"):
        losses[loss](AlgorithmConfig(clip_high=-0.1))


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"algorithm.dual_clip=0.5: must be greater than 1, or be 0"
    ):
        AlgorithmConfig(dual_clip=0.5)
    with pytest.raises(ValueError, match=r"algorithm.dro_beta=0.0: must be greater than 0"):
        AlgorithmConfig(dro_beta=0.0)
    with pytest.raises(ValueError, match=r"algorithm.gamma=1.5"):
        AlgorithmConfig(gamma=1.5)
    with pytest.raises(ValueError, match=r"algorithm.tau_negative"):
        AlgorithmConfig(tau_negative=0.0)
