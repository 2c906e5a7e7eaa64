"""Sums over groups and sequences against loops in plain Python."""

import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.algo import outcomes as outcomes_module
from mcore_rl.algo.outcomes import Groups, Outcomes

ROWS = st.lists(
    st.tuples(st.integers(-8, 8), st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=12
)
"""(reward, group, tokens) of each sample."""


def make_outcomes(rows: list[tuple[int, int, int]], **fields: Any) -> Outcomes:
    rewards, groups, lens = (torch.tensor(column) for column in zip(*rows, strict=True))
    return Outcomes(rewards.double(), groups, lens, **fields)


@given(ROWS)
def test_every_sample_is_a_member_of_its_group(rows: list[tuple[int, int, int]]) -> None:
    members = Groups.from_ids(make_outcomes(rows).group_N).members
    expected = [
        [i for i, row in enumerate(rows) if row[1] == group]
        for group in sorted({group for _, group, _ in rows})
    ]
    assert members == expected


@given(ROWS)
def test_groups_agree_with_plain_python(rows: list[tuple[int, int, int]]) -> None:
    outcomes = make_outcomes(rows)
    groups = Groups.from_ids(outcomes.group_N)
    members = [[reward for reward, g, _ in rows if g == group] for _, group, _ in rows]

    def per_sample(function: Callable[[list[int]], float]) -> list[float]:
        return [function(group) for group in members]

    assert groups.sizes_N.tolist() == per_sample(len)
    assert groups.sum(outcomes.scores_N).tolist() == per_sample(sum)
    centered_N = groups.center(outcomes.scores_N)
    means = per_sample(statistics.fmean)
    expected = [reward - mean for (reward, _, _), mean in zip(rows, means, strict=True)]
    assert centered_N.tolist() == pytest.approx(expected, abs=1e-9)
    deviations = per_sample(lambda group: statistics.stdev(group) if len(group) > 1 else 0.0)
    assert groups.std(centered_N).tolist() == pytest.approx(deviations, abs=1e-9)


@given(ROWS, st.floats(0.1, 1.0), st.integers(1, 40))
def test_rewards_to_go_agree_with_a_loop(
    rows: list[tuple[int, int, int]], gamma: float, block_tokens: int
) -> None:
    num_tokens = sum(num for _, _, num in rows)
    token_rewards_R = torch.arange(num_tokens).double()
    outcomes = make_outcomes(rows, token_rewards_R=token_rewards_R)
    expected = []
    first = 0
    for reward, _, num in rows:
        rewards = [float(first + t) for t in range(num)]
        if num:
            rewards[-1] += reward
        expected += [
            sum(gamma ** (later - t) * rewards[later] for later in range(t, num))
            for t in range(num)
        ]
        first += num
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outcomes_module, "BLOCK_TOKENS", block_tokens)
        assert outcomes.rewards_to_go(gamma).tolist() == pytest.approx(expected)
    assert token_rewards_R.tolist() == list(range(num_tokens)), "the given rewards were changed"
    ends = [sum(num for _, _, num in rows[: i + 1]) for i in range(len(rows))]
    totals = [sum(range(end - row[2], end)) for end, row in zip(ends, rows, strict=True)]
    assert outcomes.scores_N.tolist() == [
        row[0] + total for row, total in zip(rows, totals, strict=True)
    ]


@given(ROWS)
def test_values_are_spread_over_tokens_and_summed_by_sample(
    rows: list[tuple[int, int, int]],
) -> None:
    outcomes = make_outcomes(rows)
    spread_R = outcomes.spread(outcomes.rewards_N)
    assert spread_R.tolist() == [float(reward) for reward, _, num in rows for _ in range(num)]
    assert outcomes.sums_N(spread_R).tolist() == [float(reward * num) for reward, _, num in rows]


def test_equal_values_are_centered_to_exactly_zero() -> None:
    values_N = torch.full((7,), 1e8 + 0.1, dtype=torch.float64)
    assert not Groups.from_ids(torch.zeros(7).long()).center(values_N).any()


def test_shapes_and_rewards_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rewards, groups and lens must all be \[N\], are \(2,\)"):
        Outcomes(torch.zeros(2), torch.zeros(3).long(), torch.zeros(2).long())
    rewards_N = torch.tensor([0.0, torch.nan, torch.inf])
    with pytest.raises(ValueError, match=r"rewards of samples \[1, 2\] are not finite"):
        Outcomes(rewards_N, torch.zeros(3).long(), torch.ones(3).long())
    with pytest.raises(ValueError, match=r"token rewards \(2,\) for 1 tokens"):
        make_outcomes([(1, 0, 1)], token_rewards_R=torch.zeros(2))
