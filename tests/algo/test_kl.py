"""KL estimators against their formulas and against the exact KL of two small distributions."""

import math
from dataclasses import replace

import pytest
import torch

from mcore_rl.algo.kl import KL_ESTIMATORS
from mcore_rl.config import KLConfig

FORMULAS = {
    "k1": lambda p, q: math.log(p / q),
    "k2": lambda p, q: 0.5 * math.log(p / q) ** 2,
    "k3": lambda p, q: q / p - 1 - math.log(q / p),
    "abs": lambda p, q: abs(math.log(p / q)),
}
STRAIGHT_THROUGH = {f"{name}+": name for name in ("k1", "k3", "abs")}
POLICY = [0.5, 0.3, 0.15, 0.05]
REFERENCE = [0.4, 0.3, 0.1, 0.2]


def test_every_estimator_has_a_formula() -> None:
    assert KL_ESTIMATORS.names == sorted([*FORMULAS, *STRAIGHT_THROUGH])
    for name in KL_ESTIMATORS.names:
        assert replace(KLConfig(), estimator=name).estimator == name


@pytest.mark.parametrize("name", FORMULAS)
def test_values_and_gradients(name: str) -> None:
    p = torch.tensor(POLICY, dtype=torch.float64)
    log_ratio = (p.log() - torch.tensor(REFERENCE, dtype=torch.float64).log()).requires_grad_()
    expected = [FORMULAS[name](a, b) for a, b in zip(POLICY, REFERENCE, strict=True)]
    torch.testing.assert_close(
        KL_ESTIMATORS[name](log_ratio), torch.tensor(expected, dtype=torch.float64)
    )
    away_from_0 = log_ratio.detach()[[0, 2, 3]].requires_grad_()
    assert torch.autograd.gradcheck(KL_ESTIMATORS[name], (away_from_0,))


@pytest.mark.parametrize("name", STRAIGHT_THROUGH)
def test_straight_through_has_the_value_of_one_and_the_gradient_of_k2(name: str) -> None:
    log_ratio = torch.linspace(-1, 1, 7, dtype=torch.float64, requires_grad=True)
    kl = KL_ESTIMATORS[name](log_ratio)
    torch.testing.assert_close(kl, KL_ESTIMATORS[STRAIGHT_THROUGH[name]](log_ratio))
    (gradient,) = torch.autograd.grad(kl.sum(), log_ratio)
    torch.testing.assert_close(gradient, log_ratio.detach())


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased(name: str) -> None:
    exact = sum(p * math.log(p / q) for p, q in zip(POLICY, REFERENCE, strict=True))
    log_ratio = torch.tensor([math.log(p / q) for p, q in zip(POLICY, REFERENCE, strict=True)])
    mean = (torch.tensor(POLICY) * KL_ESTIMATORS[name](log_ratio)).sum()
    assert mean.item() == pytest.approx(exact, abs=1e-6)


def test_k2_has_the_gradient_of_the_kl_and_k1_has_none() -> None:
    """Expected over the policy's samples, with only the estimator differentiated, as in a loss."""
    reference = torch.tensor(REFERENCE, dtype=torch.float64).log()
    logits = torch.tensor(POLICY, dtype=torch.float64).log().requires_grad_()
    policy = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits)
    for name, expected in (("k2", exact), ("k1", torch.zeros_like(exact))):
        policy = logits.log_softmax(0)
        mean = (policy.exp().detach() * KL_ESTIMATORS[name](policy - reference)).sum()
        (gradient,) = torch.autograd.grad(mean, logits)
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


def test_k3_is_exact_for_ratios_near_one_in_float32() -> None:
    assert KL_ESTIMATORS["k3"](torch.tensor([1e-3])).item() == pytest.approx(0.5e-6, rel=0.15)
    assert KL_ESTIMATORS["k3"](torch.zeros(1)).item() == 0.0
