"""A difference makes the message now of the one before, in about three bytes per change."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.stream.routes.delta_code import (
    apply,
    difference,
    elements,
    num_places_bytes,
)
from mcore_rl.types import Array


def made_of(before: Array, now: Array) -> Array:
    changes = difference(before, now)
    made = before.copy()
    apply(changes.form, changes.places, changes.values, made)
    assert changes.num_bytes == changes.places.nbytes + 2 * len(changes.values)
    num_places = num_places_bytes(changes.form, len(changes.values), len(now))
    assert num_places == len(changes.places)
    return made


@given(
    st.integers(0, 2**32 - 1), st.integers(0, 3000), st.sampled_from([0.0, 0.001, 0.01, 0.2, 1.0])
)
def test_any_difference_makes_the_message(seed: int, num: int, share: float) -> None:
    drawn = np.random.default_rng(seed)
    before = drawn.integers(0, 2**16, num).astype(np.uint16)
    now = np.where(drawn.random(num) < share, before + 1, before).astype(np.uint16)
    assert (made_of(before, now) == now).all()


@pytest.mark.parametrize("at", [0, 254, 255, 256, 257, 511, 512, 99_999])
def test_gaps_of_any_length(at: int) -> None:
    before = np.zeros(100_000, np.uint16)
    now = before.copy()
    now[at] = 7
    changes = difference(before, now)
    assert changes.form == "gaps" and len(changes.values) == 1 + at // 256
    assert (made_of(before, now) == now).all()


@pytest.mark.parametrize(
    ("share", "form", "bytes_share"), [(0.01, "gaps", 0.02), (0.2, "bits", 0.27)]
)
def test_the_shorter_form_is_taken(share: float, form: str, bytes_share: float) -> None:
    drawn = np.random.default_rng(0)
    before = np.zeros(200_000, np.uint16)
    now = (drawn.random(200_000) < share).astype(np.uint16)
    changes = difference(before, now)
    assert changes.form == form
    assert changes.num_bytes / now.nbytes == pytest.approx(bytes_share, abs=0.01)


def test_places_beyond_the_message_are_refused() -> None:
    values = np.zeros(2, np.uint16)
    with pytest.raises(ValueError, match="2 values for 2 places in 10 elements"):
        apply("gaps", np.array([5, 4], np.uint8), values, np.zeros(10, np.uint16))
    with pytest.raises(ValueError, match="2 values for 1 places"):
        apply("bits", np.array([128, 0], np.uint8), values, np.zeros(10, np.uint16))


def test_elements_are_a_view() -> None:
    message_u8 = torch.zeros(6, dtype=torch.uint8)
    elements(message_u8)[1] = 3
    assert message_u8.tolist() == [0, 0, 3, 0, 0, 0]
