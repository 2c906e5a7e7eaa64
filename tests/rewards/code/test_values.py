"""Plain values keep their kinds on the way through JSON; nothing else passes."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.rewards.code.driver import pack, unpack

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
hashable = st.recursive(scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner))
values = st.recursive(
    hashable,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner)
        | st.dictionaries(hashable, inner, max_size=3)
        | st.sets(hashable, max_size=3)
    ),
    max_leaves=12,
)


@given(values)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    back = unpack(json.loads(json.dumps(pack(value))))
    assert back == value and type(back) is type(value)


@pytest.mark.parametrize("value", [object(), {1: [object()]}, 1j, b"bytes", len])
def test_an_object_that_could_act_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="is no plain value"):
        pack(value)


@pytest.mark.parametrize("packed", [["list"], ["os", []], [["x"], []], {"a": 1}, ["list", 1]])
def test_what_was_not_packed_is_refused(packed: Any) -> None:
    with pytest.raises(ValueError, match=r"was not packed|is no kind of value"):
        unpack(packed)
