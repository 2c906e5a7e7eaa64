"""Micro-batch plans: every sequence once, within the budget, ranks alike."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.batches.packing import (
    _first_fit,
    _pieces,
    plan_microbatches,
    plan_shared_microbatches,
)
from mcore_rl.batches.shared_prefixes import Sharing


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


def quadratic(num_tokens: int) -> float:
    """n + n^2 / 10."""
    return num_tokens + num_tokens**2 / 10


def works_of(plan: list[list[list[int]]], lens_N: list[int]) -> list[list[float]]:
    """Return the work of each micro-batch, by rank."""
    return [[sum(quadratic(lens_N[i]) for i in part) for part in rank] for rank in plan]


@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=80),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
)
def test_work_is_balanced_within_the_tokens_of_a_micro_batch(
    lens_N: list[int], dp_size: int, multiple_of: int
) -> None:
    plan = plan_microbatches(lens_N, dp_size, 64, multiple_of, quadratic)
    assert sorted(i for rank in plan for part in rank for i in part) == list(range(len(lens_N)))
    assert all(sum(lens_N[i] for i in part) <= 64 for rank in plan for part in rank)
    by_tokens = plan_microbatches(lens_N, dp_size, 64, multiple_of)
    assert {len(rank) for rank in plan} == {len(rank) for rank in by_tokens}, "more micro-batches"
    works = works_of(plan, lens_N)
    totals = [sum(rank) for rank in works]
    assert max(totals) - min(totals) <= max(map(max, works)) + 1e-9, "ranks differ by more than one"


@given(st.lists(st.integers(1, 64), min_size=1, max_size=60), st.integers(1, 8))
def test_the_most_work_is_within_grahams_bound(lens_N: list[int], num_bins: int) -> None:
    """List scheduling, Graham 1969: at most the mean and the largest but for its own share.

    The token cap is out of the way; the number of micro-batches is a multiple of `num_bins`.
    """
    [parts] = plan_microbatches(lens_N, 1, sum(lens_N), num_bins, quadratic)
    assert len(parts) == num_bins
    [works] = works_of([parts], lens_N)
    largest = max(map(quadratic, lens_N))
    assert max(works) <= sum(works) / num_bins + largest * (1 - 1 / num_bins) + 1e-9


@pytest.mark.parametrize(
    ("lens_N", "max_tokens", "by_tokens", "by_work"),
    [
        # 80 tokens are 720 of work, 40 are 200, 10 are 20.
        ([80, 40, 40, *[10] * 16], 240, [880, 560], [720, 720]),
        ([80, 40, 40, *[10] * 16], 200, [880, 560], [800, 640]),  # 200 tokens leave no more room
        ([40, 40, *[10] * 8], 240, [280, 280], [280, 280]),
        ([60, *[20] * 3, *[10] * 6], 150, [480, 240], [420, 300]),
    ],
)
def test_a_mix_of_long_and_short_sequences_is_balanced_by_work(
    lens_N: list[int], max_tokens: int, by_tokens: list[float], by_work: list[float]
) -> None:
    for work, expected in ((float, by_tokens), (quadratic, by_work)):
        plan = plan_microbatches(lens_N, 2, max_tokens, 1, work)
        totals = sorted((sum(rank) for rank in works_of(plan, lens_N)), reverse=True)
        assert totals == pytest.approx(expected), work


def test_where_work_finds_no_room_tokens_are_balanced_before_there_are_more() -> None:
    """Two micro-batches of 10 tokens hold these exactly: 7 + 3 and 5 + 3 + 2."""
    lens_N = [7, 5, 3, 3, 2]
    plan = plan_microbatches(lens_N, 1, 10, 1, quadratic)
    assert [sum(lens_N[i] for i in part) for part in plan[0]] == [10, 10]


def test_each_round_is_dealt_in_the_reverse_order_of_the_last() -> None:
    """Each micro-batch has one sequence: 9 8 | 7 6 | 5 4 -> 9 + 6 + 5 and 8 + 7 + 4."""
    lens_N = [4, 5, 6, 7, 8, 9]
    plan = plan_microbatches(lens_N, 2, 9)
    dealt = [[lens_N[i] for part in rank for i in part] for rank in plan]
    assert dealt == [[9, 6, 5], [8, 7, 4]]


def test_what_a_sequence_takes_over_from_another_is_no_work() -> None:
    """The prompt of 10 tokens is computed once; both responses of 20 see it."""
    sharing = Sharing((-1, 0), (0, 9), (0, 1))
    [piece] = _pieces([30, 30], sharing, 100)
    assert piece.num_tokens([30, 30]) == 30 + 21
    assert piece.work([30, 30], quadratic) == pytest.approx(120 + 120 - (9 + 8.1))
    apart = _pieces([30, 30], sharing, 40)
    assert [part.work([30, 30], quadratic) for part in apart] == [120, 120]


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


def groups(num: int, size: int, prompt_len: int) -> Sharing:
    """Return the sharing of `size` responses to each of `num` prompts, in chains."""
    parents = [n - 1 if n % size else -1 for n in range(num * size)]
    starts = [prompt_len - 1 if parent >= 0 else 0 for parent in parents]
    return Sharing(tuple(parents), tuple(starts), tuple(range(num * size)))


def computed(part: list[int], lens_N: list[int], sharing: Sharing) -> int:
    """Return the tokens that a micro-batch computes."""
    kept = sum(sharing.starts[n] for n in part if sharing.parents[n] in part)
    return sum(lens_N[n] for n in part) - kept


@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(4, 40),
    st.lists(st.integers(1, 24), min_size=36, max_size=36),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
)
def test_shared_plans_are_exact_and_within_budget(
    num: int, size: int, prompt_len: int, responses: list[int], dp_size: int, multiple_of: int
) -> None:
    sharing = groups(num, size, prompt_len)
    lens_N = [prompt_len + own for own in responses[: num * size]]
    plan = plan_shared_microbatches(lens_N, sharing, dp_size, 64, multiple_of)
    assert len({len(rank) for rank in plan}) == 1 and len(plan[0]) % multiple_of == 0
    parts = [part for rank in plan for part in rank]
    assert sorted(n for part in parts for n in part) == list(range(num * size))
    assert all(computed(part, lens_N, sharing) <= 64 for part in parts)


def test_the_responses_of_a_prompt_stay_together_where_ranks_are_balanced() -> None:
    """There are 8 groups of 4 with prompts of 90 tokens; a rank computes each of 2 prompts once."""
    sharing, lens_N = groups(8, 4, 90), [100] * 32
    plan = plan_shared_microbatches(lens_N, sharing, 4, max_tokens=260)
    for rank in plan:
        assert sum(computed(part, lens_N, sharing) for part in rank) == 2 * (100 + 3 * 11)
    plan = plan_shared_microbatches(lens_N, sharing, 16, max_tokens=260)
    loads = [sum(computed(part, lens_N, sharing) for part in rank) for rank in plan]
    assert max(loads) <= 122  # each prompt is computed twice; 3 and 1 of its responses
