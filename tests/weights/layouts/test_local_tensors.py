"""Views are traced back to the parameter that they lie in."""

import pytest
import torch

from mcore_rl.weights.layouts.layout import LocalTensors


def test_views_are_located_by_the_element_they_begin_at() -> None:
    qkv = torch.zeros(12, 8)
    local = LocalTensors({"qkv": qkv})
    assert local.locate(qkv) == ("qkv", 0)
    assert local.locate(qkv[4:8]) == ("qkv", 32)
    assert local.locate(qkv[4:8, 3:].t()) == ("qkv", 35)


def test_parameters_that_share_a_memory_block_are_told_apart() -> None:
    buffer = torch.zeros(10)
    local = LocalTensors({"a": buffer[:4], "b": buffer[4:8]})
    assert local.locate(buffer[2:4]) == ("a", 2)
    assert local.locate(buffer[6:]) == ("b", 2)
    assert local.locate(buffer[8:]) is None


def test_other_memory_and_other_dtypes_belong_to_no_parameter() -> None:
    weight = torch.zeros(4)
    local = LocalTensors({"w": weight})
    assert local.locate(torch.zeros(4)) is None
    assert local.locate(weight.view(torch.int32)) is None


def test_a_parameter_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parameter 'w' is not contiguous \(strides \(1, 3\)\)"):
        LocalTensors({"w": torch.zeros(2, 3).t()})


def test_replaced_memory_is_noticed() -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    local = LocalTensors({"w": weight})
    weight.data.fill_(1.0)
    local.check_unchanged()
    weight.data = torch.zeros(4)
    with pytest.raises(ValueError, match="replaced the memory of parameter 'w'"):
        local.check_unchanged()


def test_the_device_is_that_of_the_parameters() -> None:
    assert LocalTensors({}).device == torch.device("cpu")
    assert LocalTensors({"w": torch.zeros(1, device="meta")}).device == torch.device("meta")
