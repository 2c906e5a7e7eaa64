"""Block FP8 quantization follows the published formula and agrees with transformers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from mcore_rl.weights.hf.quantize import quantize_into
from tests.support.fp8_oracle import dequantize, per_block_cast_to_fp8

NAME = "model.layers.0.mlp.up_proj.weight"
SCALES = "model.layers.0.mlp.up_proj.weight_scale_inv"


def quantize(weights_NK: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = weights_NK.shape
    values_NK = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales_nk = torch.empty(-(-rows // 128), -(-columns // 128))
    quantize_into(weights_NK, values_NK, scales_nk)
    return values_NK, scales_nk


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are equal, which torch.equal does not check for FP8."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(128, 128), (384, 256), (1, 1), (300, 129), (576, 200)])
def test_blocks_are_quantized_by_the_published_formula(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = (
        torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
    ).to(dtype)
    before = weights.clone()
    values, scales = quantize(weights)
    assert equal(weights, before)
    wanted_values, wanted_scales = per_block_cast_to_fp8(weights)
    assert equal(values, wanted_values)
    assert equal(scales, wanted_scales)
    error = (dequantize(values, scales) - weights.float()).abs()
    step = 2.0**-9 * dequantize(torch.ones_like(values), scales)
    assert (error <= weights.float().abs() * 2.0**-4 * 1.001 + step / 2).all()


def test_transformers_quantizes_alike() -> None:
    weights = torch.randn(512, 384, generator=torch.Generator().manual_seed(1))

    quantizer = SimpleNamespace(
        quantization_config=FineGrainedFP8Config(weight_block_size=(128, 128))
    )
    matrices: Any = {NAME: weights}
    theirs = Fp8Quantize(quantizer).convert(matrices)
    values, scales = quantize(weights)
    assert (scales / theirs[SCALES] - 1).abs().max() < 1e-6
    differ = values.float() != theirs[NAME].float()
    assert differ.float().mean() < 1e-3
    assert (values.float() - theirs[NAME].float()).abs().max() <= values.float().abs().max() / 8


def test_blocks_of_zeros_small_and_broken_values() -> None:
    weights = torch.zeros(128, 512)
    weights[:, 128:256] = 1e-9
    weights[0, 256], weights[1, 256] = float("nan"), 1.0
    weights[0, 384], weights[1, 384] = float("inf"), 1.0
    values, scales = quantize(weights)
    small = dequantize(values, scales)[:, :256]
    assert (small - weights[:, :256]).abs().max() <= 1e-9
    assert dequantize(values, scales)[:, 256:384].isnan().all()
    assert dequantize(values, scales)[0, 384].isnan()
