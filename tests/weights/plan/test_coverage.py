"""The coverage check agrees with a counter per element."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.weights.box import Box, Padding, Shard, contiguous_strides
from mcore_rl.weights.plan.coverage import check_coverage, runs


def rows(start: int, stop: int, name: str = "w", num_columns: int = 4) -> Shard:
    return Shard(
        Box(name, (start, 0), (stop, num_columns)),
        "local",
        start * num_columns,
        (num_columns, 1),
        "int8",
    )


def test_shards_and_padding_that_tile_the_tensor_pass():
    check_coverage([rows(2, 5), rows(0, 2)], [Padding("local", 20, (4,), (1,))], {"local": 24})


@pytest.mark.parametrize(
    ("shards", "padding", "message"),
    [
        ([rows(0, 2), rows(3, 6)], [], "element 8 of 24 is not covered .near w"),
        ([rows(0, 4), rows(3, 6)], [], "element 12 of 24 is covered twice"),
        ([rows(0, 6)], [Padding("local", 20, (4,), (1,))], "covered twice.*padding"),
        ([rows(0, 5)], [], "element 20 of 24 is not covered"),
        ([rows(0, 7)], [], "lies outside"),
        ([], [], "no HF tensor is loaded"),
    ],
)
def test_gaps_and_overlaps_are_named(shards, padding, message):
    with pytest.raises(ValueError, match=message):
        check_coverage(shards, padding, {"local": 24})


def test_shard_of_an_unknown_tensor_is_refused():
    with pytest.raises(ValueError, match="'local', which does not exist"):
        check_coverage([rows(0, 1)], [], {"other": 4})


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
    st.integers(0, 5),
)
def test_runs_are_the_elements_of_the_strided_view(shape, random, offset):
    order = random.sample(range(len(shape)), len(shape))
    memory = [shape[axis] + random.randrange(2) for axis in order]
    strides = [contiguous_strides(memory)[order.index(axis)] for axis in range(len(shape))]
    memory_size = offset + prod(memory)
    view = torch.arange(memory_size).as_strided(shape, strides, offset)
    starts, run_len = runs(shape, strides, offset)
    elements = [start + i for start in starts.tolist() for i in range(run_len)]
    assert sorted(elements) == sorted(view.flatten().tolist())
