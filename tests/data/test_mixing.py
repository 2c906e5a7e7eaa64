"""Sources by weight: shares exact at every moment, and a position that is a few counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.data.source import Mixing


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 400))
def test_every_source_has_its_share_to_within_one_item_at_every_moment(
    weights: list[int], num_items: int
) -> None:
    mixing = Mixing(weights)
    total = sum(weights)
    for given_items in range(1, num_items + 1):
        mixing.next()
        assert sum(mixing.counts) == given_items
        for weight, count in zip(weights, mixing.counts, strict=True):
            assert abs(weight * given_items - count * total) < total, (weights, mixing.counts)


def test_decimal_weights_are_exact() -> None:
    mixing = Mixing([0.1, 0.2, 0.7])
    chosen = [mixing.next() for _ in range(30)]
    assert mixing.counts == [3, 6, 21]
    assert chosen[:10] == chosen[10:20] == chosen[20:]
    tiny = Mixing([1e-6, 1.0])
    assert [tiny.next() for _ in range(1000)].count(0) <= 1


@given(st.lists(st.floats(0.01, 9), min_size=1, max_size=5), st.integers(0, 60))
def test_the_counts_are_the_whole_position(weights: list[float], num_before: int) -> None:
    whole = Mixing(weights)
    expected = [whole.next() for _ in range(num_before + 40)]
    before = Mixing(weights)
    for _ in range(num_before):
        before.next()
    resumed = Mixing(weights)
    resumed.counts = list(before.counts)
    assert [resumed.next() for _ in range(40)] == expected[num_before:]


@pytest.mark.parametrize("num_sources", [1, 2, 5])
def test_equal_weights_take_turns(num_sources: int) -> None:
    mixing = Mixing([1.0] * num_sources)
    chosen = [mixing.next() for _ in range(3 * num_sources)]
    for start in range(0, len(chosen), num_sources):
        assert sorted(chosen[start : start + num_sources]) == list(range(num_sources))
