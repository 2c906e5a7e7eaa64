"""Boxes and shards on small tensors; their strides, indices and padding agree with torch's."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.weights.box import Box, Padding, Shard, contiguous_strides, unravel


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


SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(SHAPES, st.data())
def test_strides_and_indices_are_those_of_torch(shape: list[int], data: st.DataObject) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    assert contiguous_strides(shape) == tensor.stride()
    element = data.draw(st.integers(0, tensor.numel() - 1))
    assert tensor[unravel(element, shape)] == element


def test_padding_is_a_view_of_its_tensor() -> None:
    tensors = {"w": torch.arange(12)}
    assert Padding("w", 2, (2, 2), (6, 1)).view(tensors).tolist() == [[2, 3], [8, 9]]


def test_a_merge_starts_without_numpy_and_torch() -> None:
    script = "import sys, checkpoint_tools.to_hf; print({'numpy', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
