"""A difference makes the message now of the one before, in about three bytes per change.

Compiled code and numpy are tried as they are, and each with what the other coded.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.types import Array
from mcore_rl.weight_sync.transports import delta
from mcore_rl.weight_sync.transports.delta import (
    Changes,
    Form,
    apply,
    count_places_bytes,
    take_changes,
    view_elements,
)

WAYS = ("compiled", "numpy") if shutil.which("cc") else ("numpy",)


@contextmanager
def coded_by(way: str) -> Iterator[None]:
    library = delta.find_library() if way == "compiled" else None
    assert (library is None) == (way == "numpy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "find_library", lambda: library)
        yield


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    with coded_by(request.param):
        yield request.param


def changes_between(before: Array, now: Array) -> Changes:
    kept = before.copy()
    changes = take_changes(kept, now)
    assert (kept == now).all(), "what is kept is not the message now"
    return changes


def made_of(before: Array, changes: Changes) -> Array:
    made = before.copy()
    assert changes.num_bytes == changes.places.nbytes + 2 * len(changes.values)
    num_places = count_places_bytes(changes.form, len(changes.values), len(made))
    assert num_places == len(changes.places)
    coded = np.concatenate([changes.places, changes.values.view(np.uint8)])
    apply(changes.form, coded[:num_places], coded[num_places:], made)
    return made


@given(
    st.integers(0, 2**32 - 1), st.integers(0, 3000), st.sampled_from([0.0, 0.001, 0.01, 0.2, 1.0])
)
def test_any_difference_makes_the_message(seed: int, num: int, share: float) -> None:
    drawn = np.random.default_rng(seed)
    before = drawn.integers(0, 2**16, num).astype(np.uint16)
    now = np.where(drawn.random(num) < share, before + 1, before).astype(np.uint16)
    coded = {}
    for way in WAYS:
        with coded_by(way):
            coded[way] = changes_between(before, now)
    assert len({(c.form, c.num_bytes) for c in coded.values()}) == 1
    for coder, reader in product(WAYS, WAYS):
        with coded_by(reader):
            assert (made_of(before, coded[coder]) == now).all()


@pytest.mark.parametrize("at", [0, 254, 255, 256, 257, 511, 512, 99_999])
def test_gaps_of_any_length(at: int, way: str) -> None:
    before = np.zeros(100_000, np.uint16)
    now = before.copy()
    now[at] = 7
    changes = changes_between(before, now)
    assert changes.form == "gaps" and len(changes.values) == 1 + at // 256
    assert (made_of(before, changes) == now).all()


@pytest.mark.parametrize(
    ("share", "form", "bytes_share"), [(0.01, "gaps", 0.02), (0.2, "bits", 0.27)]
)
def test_the_shorter_form_is_taken(share: float, form: str, bytes_share: float, way: str) -> None:
    drawn = np.random.default_rng(0)
    before = np.zeros(200_000, np.uint16)
    now = (drawn.random(200_000) < share).astype(np.uint16)
    changes = changes_between(before, now)
    assert changes.form == form
    assert changes.num_bytes / now.nbytes == pytest.approx(bytes_share, abs=0.01)


@pytest.mark.parametrize(
    ("form", "places", "num_values_bytes", "message"),
    [
        ("gaps", [5, 4], 4, "places of 2 values do not fit 10 elements"),
        ("gaps", [255, 255], 4, "places of 2 values do not fit 10 elements"),
        ("bits", [1, 0], 4, "places of 2 values do not fit 10 elements"),
        ("bits", [7, 0], 4, "places of 2 values do not fit 10 elements"),
        ("bits", [3], 4, "1 bytes of places for 4 bytes of values"),
        ("gaps", [1, 1], 3, "2 bytes of places for 3 bytes of values"),
        ("gaps", [1, 1], 5, "2 bytes of places for 5 bytes of values"),
    ],
)
def test_places_that_do_not_fit_are_refused(
    form: Form, places: list[int], num_values_bytes: int, message: str, way: str
) -> None:
    to = np.zeros(12, np.uint16)[:10]
    with pytest.raises(ValueError, match=message):
        apply(form, np.array(places, np.uint8), np.ones(num_values_bytes, np.uint8), to)
    assert to.base is not None and not to.base[10:].any(), "written beyond the message"


def test_elements_are_a_view() -> None:
    message_u8 = torch.zeros(6, dtype=torch.uint8)
    view_elements(message_u8)[1] = 3
    assert message_u8.tolist() == [0, 0, 3, 0, 0, 0]
