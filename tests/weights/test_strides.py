"""Strides and indices agree with torch's; padding is the view that torch makes of it."""

import subprocess
import sys

import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.weights.box import Padding, contiguous_strides, unravel

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
