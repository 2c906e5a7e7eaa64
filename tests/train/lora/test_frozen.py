"""Frozen weights that one process lends are mapped by another, if their bits are the same."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mcore_rl.train.lora.frozen import BaseSharing, FrozenWeights


def make_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"0.a": (3, 5), "0.b": (7, 2), "1.c": (1, 9)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return tensors | {"1.c": tensors["1.c"].bfloat16()}


def test_equal_tensors_are_shared_and_others_copied() -> None:
    tensors = make_tensors()
    lender = FrozenWeights(tensors, BaseSharing(lends=True))
    assert lender.path.startswith(f"/proc/{os.getpid()}/fd/")
    for name, tensor in tensors.items():
        assert torch.equal(lender.copies[name], tensor) and lender.copies[name].is_contiguous()
    other = {**tensors, "0.b": tensors["0.b"] + 1, "2.d": torch.ones(4)}
    borrower = FrozenWeights(other, BaseSharing(borrowed=lender.path))
    assert all(torch.equal(borrower.copies[name], tensor) for name, tensor in other.items())
    assert borrower.own_bytes == other["0.b"].nbytes + other["2.d"].nbytes
    lender.copies["0.a"].zero_()
    lender.copies["0.b"].zero_()
    assert not borrower.copies["0.a"].any() and borrower.copies["0.b"].any()


def test_an_index_may_be_longer_than_its_tensors() -> None:
    tensors = {f"{number}." + "x" * 500: torch.tensor([number]) for number in range(300)}
    lender = FrozenWeights(tensors, BaseSharing(lends=True))
    borrower = FrozenWeights(tensors, BaseSharing(borrowed=lender.path))
    assert borrower.own_bytes == 0
    assert all(torch.equal(borrower.copies[name], tensor) for name, tensor in tensors.items())


def test_what_is_mapped_outlives_its_lender() -> None:
    tensors = make_tensors()
    lender = FrozenWeights(tensors, BaseSharing(lends=True))
    borrower = FrozenWeights(tensors, BaseSharing(borrowed=lender.path))
    lender._memory.close()
    assert borrower.own_bytes == 0
    assert all(torch.equal(borrower.copies[name], tensor) for name, tensor in tensors.items())


def test_memory_that_is_gone_is_copied_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = make_tensors()
    alone = FrozenWeights(tensors, BaseSharing(borrowed=str(tmp_path / "gone")))
    assert alone.own_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert "frozen weights are copied" in caplog.text and alone.path == ""
