"""The clipped policy loss against its case table, written out token by token in float64."""

import math

import pytest
import torch

from mcore_rl.algo.losses import LOSSES, ppo_clip
from mcore_rl.config import AlgorithmConfig

LOW, HIGH = 0.2, 0.3
RATIOS = [0.2, 0.79, 0.81, 1.0, 1.29, 1.31, 4.0]
CASES = [(ratio, advantage) for ratio in RATIOS for advantage in (-1.5, 0.0, 2.0)]


def reference(ratio: float, advantage: float) -> tuple[float, float]:
    """(loss, d loss / d log ratio)."""
    if advantage > 0 and ratio > 1 + HIGH:
        return -(1 + HIGH) * advantage, 0.0
    if advantage < 0 and ratio < 1 - LOW:
        return -(1 - LOW) * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


def test_values_gradients_and_clipped_tokens() -> None:
    log_ratio_T = torch.tensor([math.log(r) for r, _ in CASES], dtype=torch.float64, requires_grad=True)
    advantages_T = torch.tensor([a for _, a in CASES], dtype=torch.float64)
    loss_T, metrics = ppo_clip(log_ratio_T, advantages_T, clip_low=LOW, clip_high=HIGH)
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), log_ratio_T)
    expected = torch.tensor([reference(*case) for case in CASES], dtype=torch.float64)
    torch.testing.assert_close(loss_T.detach(), expected[:, 0])
    torch.testing.assert_close(gradient_T, expected[:, 1])
    assert [r for (r, _), low in zip(CASES, metrics["clip/low_share"], strict=True) if low] == [0.2, 0.79]
    assert [r for (r, _), high in zip(CASES, metrics["clip/high_share"], strict=True) if high] == [1.31, 4.0]


def test_gradcheck_away_from_the_kinks() -> None:
    log_ratio_T = torch.tensor(RATIOS, dtype=torch.float64).log().requires_grad_()
    for sign in (-1.0, 1.0):
        advantages_T = torch.full_like(log_ratio_T, sign).detach()
        assert torch.autograd.gradcheck(
            lambda x, a=advantages_T: ppo_clip(x, a, clip_low=LOW, clip_high=HIGH)[0], (log_ratio_T,)
        )


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_on_policy_the_gradient_is_the_policy_gradient(clip: float) -> None:
    log_ratio_T = torch.zeros(3, requires_grad=True)
    advantages_T = torch.tensor([1.0, -2.0, 0.5])
    loss_T, _ = ppo_clip(log_ratio_T, advantages_T, clip_low=clip, clip_high=clip)
    loss_T.sum().backward()
    torch.testing.assert_close(log_ratio_T.grad, -advantages_T)


def test_a_negative_clip_is_refused() -> None:
    with pytest.raises(ValueError, match=r"algorithm.clip_high=-0.1"):
        LOSSES["ppo_clip"](AlgorithmConfig(clip_high=-0.1))
