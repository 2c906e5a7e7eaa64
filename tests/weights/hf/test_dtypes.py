"""The sizes of dtypes are those of torch."""

import torch

from mcore_rl.weights.box import ITEMSIZE


def test_sizes_are_those_of_torch() -> None:
    assert {name: getattr(torch, name).itemsize for name in ITEMSIZE} == ITEMSIZE
