"""Moments of parts, joined, are those of the whole."""

import statistics
from dataclasses import astuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.algo.moments import Moments, join_moments, standardize

NUMBERS = st.lists(st.sampled_from([0.0, 0.1, -3.0, 1e3]) | st.floats(-1e3, 1e3), max_size=12)


def of(values: list[float]) -> Moments:
    return Moments.from_values(torch.tensor(values, dtype=torch.float64))


@given(parts=st.lists(NUMBERS, max_size=5))
def test_joined_parts_have_the_mean_and_variance_of_all_numbers(parts: list[list[float]]) -> None:
    joined = join_moments(map(of, parts))
    values = [value for part in parts for value in part]
    assert joined.num == len(values)
    if values:
        assert joined.lowest == min(values)
        assert joined.mean == pytest.approx(statistics.fmean(values), rel=1e-9, abs=1e-9)
    if len(values) > 1:
        assert joined.variance == pytest.approx(statistics.variance(values), rel=1e-9, abs=1e-9)


def test_a_small_spread_survives_a_large_mean() -> None:
    """Sums of squares of such numbers have no digit left for the variance of 1e-2."""
    joined = join_moments([of([1e9 + 0.1, 1e9 - 0.1]), of([1e9 + 0.1]), of([1e9 - 0.1])])
    assert joined.mean == pytest.approx(1e9, rel=1e-15)
    assert joined.variance == pytest.approx(4 * 0.1**2 / 3, rel=1e-6)


@pytest.mark.parametrize("value", [0.1, 1e8 + 0.1, -3.3])
def test_equal_numbers_in_any_parts_have_no_variance_and_become_zeros(value: float) -> None:
    joined = join_moments([of([value] * 3), of([]), of([value] * 7)])
    assert joined.variance == 0.0 and joined.mean == value
    standard = standardize(torch.full((3,), value, dtype=torch.float64), joined)
    assert standard.tolist() == [0.0] * 3


def test_one_part_is_left_as_it_is() -> None:
    part = of([0.1, 0.2, 0.4])
    assert join_moments([part]) == part == join_moments([Moments(), part])
    assert join_moments([]) == Moments() and Moments().mean == 0.0 == Moments().variance


def test_weights_say_how_often_a_number_is_there() -> None:
    values, weights = (
        torch.tensor([1.0, -9.0, 4.0]).double(),
        torch.tensor([2.0, 0.0, 3.0]).double(),
    )
    weighted = Moments.from_values(values, weights)
    assert astuple(weighted) == pytest.approx(astuple(of([1.0, 1.0, 4.0, 4.0, 4.0])))
    standard = standardize(values, weighted).tolist()
    assert standard[::2] == pytest.approx([-1.8 / 2.7**0.5, 1.2 / 2.7**0.5])
