"""Group advantages against the published formula, written out sample by sample in float64."""

import statistics
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mcore_rl.algo.advantages import ADVANTAGES, dr_grpo, grpo

REWARDS = st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0, 1e6])
GROUPED = st.lists(st.tuples(REWARDS, st.integers(0, 3)), min_size=1, max_size=24)


def reference(rewards: list[float], groups: list[int], divide_by_std: bool) -> list[float]:
    advantages = []
    for reward, group in zip(rewards, groups, strict=True):
        peers = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if len(set(peers)) == 1:
            advantages.append(0.0)
            continue
        scale = statistics.stdev(peers) + 1e-6 if divide_by_std else 1.0
        advantages.append((reward - statistics.fmean(peers)) / scale)
    return advantages


@given(GROUPED)
@settings(max_examples=60, deadline=None)
def test_equals_the_formula_for_groups_of_any_size_in_any_order(grouped: list[tuple[float, int]]) -> None:
    rewards, groups = [r for r, _ in grouped], [g for _, g in grouped]
    for function, divide_by_std in ((grpo, True), (dr_grpo, False)):
        advantages = function(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups))
        expected = torch.tensor(reference(rewards, groups, divide_by_std), dtype=torch.float32)
        torch.testing.assert_close(advantages, expected, rtol=1e-6, atol=1e-6)


def test_known_values() -> None:
    rewards_N, group_N = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([7, 7, 7, 7])
    torch.testing.assert_close(grpo(rewards_N, group_N), torch.tensor([1.5, -0.5, -0.5, -0.5]))
    torch.testing.assert_close(dr_grpo(rewards_N, group_N), torch.tensor([0.75, -0.25, -0.25, -0.25]))


@pytest.mark.parametrize("function", [grpo, dr_grpo])
@pytest.mark.parametrize("reward", [0.1, 1e8 + 0.1, -3.3])
def test_equal_rewards_and_groups_of_one_get_exactly_zero(
    function: Callable[[Tensor, Tensor], Tensor], reward: float
) -> None:
    advantages = function(torch.tensor([reward] * 7 + [5.0]), torch.tensor([0] * 7 + [1]))
    assert advantages.tolist() == [0.0] * 8


def test_refuses_what_has_no_advantage() -> None:
    with pytest.raises(ValueError, match=r"samples \[1\] are not finite"):
        grpo(torch.tensor([0.0, float("nan")]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=r"\(3,\) and"):
        grpo(torch.zeros(3), torch.zeros(2))


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"algorithm.advantage='gpro' \(did you mean 'grpo'\?\).*'dr_grpo'"):
        ADVANTAGES["gpro"]
