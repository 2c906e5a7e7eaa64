"""A rank's own metadata compared with a layout: agreement passes, every difference is named."""

import dataclasses

import pytest

from mcore_rl.weights.box import Box, Shard
from mcore_rl.weights.layouts.layout import check_rank, list_boxes
from mcore_rl.weights.layouts.listed import ListedLayout


def shard(name: str, start: int, stop: int, tensor: str = "t") -> Shard:
    return Shard(Box(name, (start,), (stop,)), tensor, 0, (1,), "float32")


LAYOUT = ListedLayout([[shard("w", 0, 4), shard("v", 0, 2)], [shard("w", 4, 8), shard("v", 0, 2)]])


def test_finer_cuts_and_a_second_place_are_fine():
    check_rank(
        LAYOUT, 0, [shard("v", 0, 2), shard("w", 0, 1), shard("w", 1, 4), shard("v", 0, 2, "tied")]
    )


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        (
            [shard("w", 4, 8)],
            "rank 1: the recorded layout of 'v' is wrong: .* of which this rank holds nothing",
        ),
        ([shard("w", 4, 8), shard("v", 0, 2), shard("u", 0, 1)], "of 'u' .* holds none of it"),
        (
            [shard("w", 3, 8), shard("v", 0, 2)],
            r"of 'w' is wrong: it says \(4,\)-\(8,\), this rank holds \(3,\)",
        ),
        ([shard("w", 4, 7), shard("v", 0, 2)], "of 'w' is wrong"),
        ([shard("w", 4, 7), shard("w", 6, 7), shard("v", 0, 2)], "of 'w' is wrong"),
        (
            [dataclasses.replace(shard("w", 4, 8), dtype="int8"), shard("v", 0, 2)],
            "dtype .*float32.*int8",
        ),
    ],
)
def test_what_differs_is_named_with_tensor_and_rank(shards, message):
    with pytest.raises(ValueError, match=message):
        check_rank(LAYOUT, 1, shards)


def test_boxes_of_a_rank_are_those_of_its_pieces() -> None:
    boxes = [(box.name, box.start, box.stop, dtype) for box, dtype in list_boxes(LAYOUT, 1)]
    assert boxes == [("v", (0,), (2,), "float32"), ("w", (4,), (8,), "float32")]
