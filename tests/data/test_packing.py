"""Micro-batch plans: every sequence once, within the budget, ranks alike."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.data.packing import _first_fit, plan_microbatches


@given(
    st.lists(st.integers(1, 64), min_size=8, max_size=60),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
)
def test_plans_are_exact_within_budget_and_even(
    lens_N: list[int], dp_size: int, multiple_of: int
) -> None:
    plan = plan_microbatches(lens_N, dp_size, max_tokens=64, multiple_of=multiple_of)
    assert len(plan) == dp_size
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) % multiple_of == 0
    assert sorted(i for rank in plan for microbatch in rank for i in microbatch) == list(
        range(len(lens_N))
    )
    assert all(sum(lens_N[i] for i in microbatch) <= 64 for rank in plan for microbatch in rank)
    num_empty = sum(not microbatch for rank in plan for microbatch in rank)
    assert num_empty < dp_size * multiple_of
    assert not num_empty or sum(map(len, plan)) > len(lens_N)
    assert plan == plan_microbatches(lens_N, dp_size, max_tokens=64, multiple_of=multiple_of)


@given(st.lists(st.integers(1, 64), min_size=1, max_size=80))
def test_as_many_bins_as_first_fit_decreasing_opens(lens_N: list[int]) -> None:
    bins: list[int] = []
    for num_tokens in sorted(lens_N, reverse=True):
        fitting = [k for k, used in enumerate(bins) if used + num_tokens <= 64]
        if fitting:
            bins[fitting[0]] += num_tokens
        else:
            bins.append(num_tokens)
    assert _first_fit(lens_N, 64) == len(bins)


def test_no_more_micro_batches_than_needed() -> None:
    plan = plan_microbatches([10] * 12, dp_size=2, max_tokens=30)
    assert [len(rank) for rank in plan] == [2, 2]


def test_ranks_are_balanced() -> None:
    lens_N = [100, 90, 80, 70, 10, 10, 10, 10]
    totals = [
        sum(lens_N[i] for mb in rank for i in mb) for rank in plan_microbatches(lens_N, 2, 200)
    ]
    assert abs(totals[0] - totals[1]) <= 20


def test_a_sequence_over_the_budget_is_named() -> None:
    message = r"sequence 1 has 65 tokens, more than train.max_tokens_per_microbatch=64"
    with pytest.raises(ValueError, match=message):
        plan_microbatches([5, 65, 7], 1, max_tokens=64)


def test_fewer_sequences_than_ranks_leave_micro_batches_empty() -> None:
    assert sorted(plan_microbatches([5], 2, max_tokens=64)) == [[[]], [[0]]]
