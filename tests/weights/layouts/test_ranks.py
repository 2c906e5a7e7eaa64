"""Compact sets of ranks agree with plain lists."""

from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.weights.layouts.layout import Ranks


@st.composite
def grids(draw: st.DrawFn) -> tuple[Ranks, list[int]]:
    first = draw(st.integers(0, 5))
    dims, ranks, extent = [], [first], 1
    for _ in range(draw(st.integers(0, 3))):
        size, stride = draw(st.integers(1, 4)), extent + draw(st.integers(0, 3))
        dims.insert(0, (size, stride))
        ranks = [i * stride + rank for i in range(size) for rank in ranks]
        extent = (size - 1) * stride + extent
    return Ranks.grid(first, *dims), ranks


def check_equal(ranks: Ranks, listed: list[int]) -> None:
    assert list(ranks) == listed
    assert len(ranks) == len(listed)
    assert [ranks[i] for i in range(len(ranks))] == listed
    for rank in range(max(listed) + 3):
        assert ranks.find(rank) == (listed.index(rank) if rank in listed else None)
        assert (rank in ranks) == (rank in listed)


@given(grids())
def test_a_grid_is_its_list(case: tuple[Ranks, list[int]]) -> None:
    check_equal(*case)


@given(st.sets(st.integers(0, 30), min_size=1), st.sets(st.integers(40, 60)))
def test_any_set_and_the_union_with_a_later_one(first: set[int], later: set[int]) -> None:
    check_equal(Ranks.from_iterable(first), sorted(first))
    check_equal(Ranks.from_iterable(later).union(Ranks.from_iterable(first)), sorted(first | later))
    assert Ranks.from_iterable(first).union(Ranks.from_iterable(first)) == Ranks.from_iterable(
        first
    )


def test_neighboring_dimensions_are_one() -> None:
    assert Ranks.grid(3, (2, 8), (4, 2)) == Ranks.grid(3, (8, 2))
    assert hash(Ranks.grid(0, (4, 1))) == hash(Ranks.from_iterable([3, 2, 1, 0]))
