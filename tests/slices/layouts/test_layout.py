"""A rank's own metadata against a layout, and layouts made of lists."""

import dataclasses

import pytest

from mcore_rl.slices.box import Box, Shard
from mcore_rl.slices.layouts.layout import NOWHERE, check_rank
from mcore_rl.slices.layouts.listed import ListedLayout


def shard(name: str, start: int, stop: int, tensor: str = "t") -> Shard:
    return Shard(Box(name, (start,), (stop,)), tensor, 0, (1,), "float32")


LAYOUT = ListedLayout([[shard("w", 0, 4), shard("v", 0, 2)], [shard("w", 4, 8), shard("v", 0, 2)]])


def test_pieces_that_overlap_are_cut_up_with_all_their_holders():
    layout = ListedLayout([[shard("w", 0, 6)], [shard("w", 4, 8)], [shard("w", 0, 8)]])
    pieces = {(p.start[0], p.stop[0]): list(p.ranks) for p in layout.placement("w").pieces}
    assert pieces == {(0, 4): [0, 2], (4, 6): [0, 1, 2], (6, 8): [1, 2]}
    assert layout.placement("other") is NOWHERE


def test_a_tensor_of_two_dtypes_is_refused():
    half = dataclasses.replace(shard("w", 0, 4), dtype="bfloat16")
    with pytest.raises(ValueError, match="'w' is bfloat16 on rank 1, but float32 on another rank"):
        ListedLayout([[shard("w", 0, 4)], [half]])


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
