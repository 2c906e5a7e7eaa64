"""Frozen weights take the place of the current ones within a block, and only there."""

import pytest
import torch
from torch import Tensor

from mcore_rl.train.offload import ReferenceWeights


def make_tensors() -> dict[str, Tensor]:
    return {"matrix": torch.ones(2, 3), "vector": torch.full((4,), 2.0, dtype=torch.bfloat16)}


def change(tensors: dict[str, Tensor]) -> None:
    for tensor in tensors.values():
        tensor.mul_(10)


def test_the_frozen_values_are_there_within_the_block_alone() -> None:
    tensors = make_tensors()
    reference = ReferenceWeights(tensors)
    change(tensors)
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    for _ in range(2):
        with reference.swap_in(tensors):
            assert all(torch.equal(tensors[name], t) for name, t in make_tensors().items())
        assert all(torch.equal(tensors[name], t * 10) for name, t in make_tensors().items())
    assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == addresses


def test_the_current_values_come_back_after_an_error() -> None:
    tensors = make_tensors()
    reference = ReferenceWeights(tensors)
    change(tensors)
    with pytest.raises(KeyError), reference.swap_in(tensors):
        raise KeyError
    assert tensors["matrix"].tolist() == [[10.0] * 3] * 2


def test_parameters_that_are_trained_can_be_swapped() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    reference = ReferenceWeights({"w": parameter})
    parameter.data.fill_(5.0)
    with reference.swap_in({"w": parameter}):
        assert parameter.tolist() == [1.0] * 3
    assert parameter.tolist() == [5.0] * 3
    assert parameter.is_leaf and parameter.grad_fn is None
