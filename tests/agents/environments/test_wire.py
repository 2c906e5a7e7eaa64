"""Frames carry JSON and arrays, and refuse the rest by name."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.agents.environments.wire import encode, read_frame

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def decode(data: bytes) -> list:
    async def read():
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        frames = []
        while (value := await read_frame(reader)) is not None:
            frames.append(value)
        return frames

    return asyncio.run(read())


@given(st.lists(JSON.filter(lambda value: value is not None), max_size=4))
def test_frames_come_back_in_order(values):
    assert decode(b"".join(map(encode, values))) == values


def test_arrays_and_tuples_become_lists():
    values = {"array": np.arange(2), "scalar": np.float32(0.5), "tuple": (1, 2)}
    assert decode(encode(values)) == [{"array": [0, 1], "scalar": 0.5, "tuple": [1, 2]}]


def test_a_frame_that_was_cut_is_the_end():
    assert decode(encode({"a": 1})[:-1]) == []


def test_other_values_are_refused_with_a_remedy():
    with pytest.raises(ValueError, match="a object is not JSON: tasks, messages and metrics"):
        encode({"a": object()})
