"""W0 + s B A has the same bits in every part of a matrix, however a rank holds it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_rl.weights.lora import product
from mcore_rl.weights.lora.product import add_by_torch, add_product

RANK = 17
SCALE = 3 / 7


def make(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (301, 517), (RANK, 517), (301, RANK)
    weight, a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return weight, a, b


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_have_the_bits_of_the_whole(dtype: torch.dtype) -> None:
    weight, a, b = make(dtype)
    whole = weight.clone()
    add_product(whole, a, b, SCALE)
    cuts = [
        (slice(0, 301), slice(3, 4)),
        (slice(7, 8), slice(0, 517)),
        (slice(5, 140), slice(100, 365)),
        (slice(300, 301), slice(516, 517)),
    ]
    for rows, columns in cuts:
        part = weight[rows, columns].clone()
        add_product(part, a[:, columns], b[rows], SCALE)
        assert torch.equal(part, whole[rows, columns]), (rows, columns)
        in_place = weight.clone()
        add_product(in_place[rows, columns], a[:, columns], b[rows], SCALE)
        assert torch.equal(in_place[rows, columns], part)
    transposed = weight.T.contiguous().T
    add_product(transposed, a.T.contiguous().T, b.T.contiguous().T, SCALE)
    assert torch.equal(transposed, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rank", "columns"), [(1, 64), (2, 63), (5, 1), (32, 517)])
def test_compiled_code_has_the_bits_of_torch(dtype: torch.dtype, rank: int, columns: int) -> None:
    weight, a, b = make(dtype)
    wanted = weight[:, :columns].clone()
    add_by_torch(wanted, a[:rank, :columns], b[:, :rank], SCALE)
    found = weight.clone()
    add_product(found[:, :columns], a[:rank, :columns], b[:, :rank], SCALE)
    assert torch.equal(found[:, :columns], wanted)
    assert torch.equal(found[:, columns:], weight[:, columns:])


def test_code_of_a_compiler_that_reorders_sums_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = SimpleNamespace(add_low_rank=lambda *arguments: None, block_columns=lambda: 64)
    monkeypatch.setattr(product, "load", lambda name: library)
    product.find_library.cache_clear()
    try:
        assert product.find_library() is None
    finally:
        product.find_library.cache_clear()
    assert "the compiler reorders sums" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_has_the_bits_of_the_host(dtype: torch.dtype) -> None:
    weight, a, b = make(dtype)
    on_gpu = weight.cuda()
    add_product(weight, a, b, SCALE)
    by_torch = on_gpu.clone()
    add_by_torch(by_torch, a.cuda(), b.cuda(), SCALE)
    add_product(on_gpu, a.cuda(), b.cuda(), SCALE)
    assert torch.equal(on_gpu.cpu(), weight) and torch.equal(by_torch.cpu(), weight)


def test_the_product_is_that_of_float64_but_for_rounding() -> None:
    weight, a, b = make(torch.float32)
    wanted = weight.double() + SCALE * b.double() @ a.double()
    add_product(weight, a, b, SCALE)
    assert (weight - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("merge", [add_product, add_by_torch])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_of_zeros_leave_every_bit(dtype: torch.dtype, merge: Any) -> None:
    """The bits of -0, too, which files of models in FP8 have."""
    weight, a, b = make(dtype)
    weight[::3] = -0.0
    weight[1::3] = 0.0
    for zeros in (torch.zeros_like(b), torch.full_like(b, -0.0)):
        merged = weight.clone()
        merge(merged, a, zeros, SCALE)
        assert torch.equal(merged.view(torch.uint8), weight.view(torch.uint8))
