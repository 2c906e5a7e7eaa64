"""Policy losses with a ratio of the sequence against the published ones: value and gradient."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mcore_rl.algo.losses import vespo as vespo_of_tokens
from mcore_rl.algo.registry import LossTokens
from mcore_rl.config import AlgorithmConfig, VespoConfig
from tests.support.loss_cases import (
    FAR,
    HIGH,
    LENS,
    LOW,
    Case,
    check_bounds,
    check_on_policy,
    check_published,
    make_case,
    surrogate,
)


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


def luspo(c: Case) -> Tensor:
    """LUSPO: GSPO's ratio and clip, each sequence times its length."""
    ratio = (((c.logprobs - c.old) * c.mask).sum(1) / c.lens).exp()
    return (c.lens * surrogate(ratio, c.advantages[:, 0])).mean()


def vespo(c: Case) -> Tensor:
    """VESPO: minus phi(W) A log policy of each sequence, summed; over all tokens."""
    total = torch.zeros((), dtype=torch.float64)
    for i, n in enumerate(LENS):
        advantage = c.advantages[i, 0]
        power, decay = (1.5, 2.5) if advantage >= 0 else (3.5, 0.5)
        product = (c.logprobs - c.old)[i, :n].detach().exp().prod()
        weight = product**power * (decay * (1 - product)).exp()
        total = total - weight * advantage * c.logprobs[i, :n].sum()
    return total / sum(LENS)


CONFIG = AlgorithmConfig(
    aggregation="sequence_mean",
    clip_low=LOW,
    clip_high=HIGH,
    vespo=VespoConfig(
        power_positive=1.5, decay_positive=2.5, power_negative=3.5, decay_negative=0.5
    ),
)
REFERENCES: dict[str, tuple[Callable[[Case], Tensor], AlgorithmConfig]] = {
    "gspo": (gspo, replace(CONFIG, loss="gspo")),
    "luspo": (luspo, replace(CONFIG, loss="luspo")),
    "gmpo": (gmpo, replace(CONFIG, loss="gmpo")),
    "vespo": (vespo, replace(CONFIG, loss="vespo", aggregation="token_mean")),
}


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("spread", [FAR, 0.02], ids=["far", "near"])
def test_value_and_gradient_are_those_of_the_published_loss(name: str, spread: float) -> None:
    check_published(*REFERENCES[name], spread)


@pytest.mark.parametrize("name", REFERENCES)
def test_far_from_the_old_policy_the_bounds_of_each_loss_take_hold(name: str) -> None:
    """Else the test above would pass without them."""
    check_bounds(REFERENCES[name][1])


@pytest.mark.parametrize("name", REFERENCES)
def test_on_policy_the_gradient_is_the_policy_gradient(name: str) -> None:
    mask = make_case().mask
    weights = {
        "sequence_mean": mask / mask.sum(1, keepdim=True) / len(LENS),
        "luspo": mask / len(LENS),
        "token_mean": mask / mask.sum(),
    }
    config = REFERENCES[name][1]
    check_on_policy(config, weights["luspo" if name == "luspo" else config.aggregation])


@pytest.mark.parametrize(("ratio", "weight"), [(1e30, 0.0), (1.0, 1.0), (1e-30, 1e-16)])
def test_the_weight_of_vespo_stays_finite_for_any_product(ratio: float, weight: float) -> None:
    """A product below 1e-8 counts as 1e-8, here squared, times e^3."""
    log_ratio_T = torch.full((2,), math.log(ratio) / 2)
    tokens = LossTokens(
        logprobs_T=torch.full((2,), -1.0),
        log_ratio_T=log_ratio_T,
        advantages_T=torch.ones(2),
        sequence_mean=lambda values_T: values_T,
        sequence_sum=lambda values_T: values_T.sum().expand(2),
    )
    loss_T, _ = vespo_of_tokens(tokens, positive=(2.0, 3.0), negative=(3.0, 2.0))
    wanted = weight * (math.e**3 if ratio < 1 else 1)
    assert loss_T.tolist() == pytest.approx([wanted] * 2, rel=1e-4)


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"algorithm.vespo.decay_negative=0.0: must be greater"):
        VespoConfig(decay_negative=0.0)
    with pytest.raises(ValueError, match=r"algorithm.vespo.power_positive=-1: must be at least 0"):
        VespoConfig(power_positive=-1)
