"""Boxes and shards on small tensors."""

import pytest
import torch

from mcore_rl.weights.box import Box, Shard


def test_an_empty_box_is_refused_with_its_bounds():
    with pytest.raises(ValueError, match=r"box of w: start \(2,\) and stop \(2,\)"):
        Box("w", (2,), (2,))


def test_intersection_is_what_both_hold():
    box = Box("w", (0, 2), (4, 6))
    assert box.intersect(Box("w", (3, 0), (9, 3))) == Box("w", (3, 2), (4, 3))
    assert box.intersect(Box("w", (4, 0), (9, 9))) is None
    assert box.intersect(Box("v", (0, 2), (4, 6))) is None


def test_a_shard_views_and_narrows_in_place_behind_a_storage_offset():
    buffer = torch.arange(30)
    local = {"qkv": buffer[6:].view(6, 4)}
    shard = Shard(Box("k", (4, 0), (6, 4)), "qkv", 8, (4, 1), "int64")
    assert torch.equal(shard.view(local), local["qkv"][2:4])
    part = shard.within(Box("k", (5, 1), (6, 3)))
    part.view(local).zero_()
    assert local["qkv"].eq(0).nonzero().tolist() == [[3, 1], [3, 2]]
    assert shard.num_bytes == 64
