"""Quantizes bfloat16 or float32 weights to block FP8, band by band, and dequantizes them."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from mcore_rl.device.gpu_kernels import has_kernel, quantize_blocks
from mcore_rl.weights.hf.fp8 import BLOCK

_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
_MIN_AMAX = 1e-4
"""Smallest magnitude that a scale is computed for, so that a block of zeros has no scale of 0."""


def quantize_into(weights_NK: Tensor, values_NK: Tensor, scales_nk: Tensor) -> None:
    """Fill `values_NK` (float8_e4m3fn) and `scales_nk` (float32) from `weights_NK`.

    `weights_NK` must begin where a block begins. The scale of a block is max(largest magnitude,
    1e-4) / 448, as in DeepGEMM's per_block_cast_to_fp8. NaN and infinity stay visible: they become
    NaN. On a GPU one kernel does it; elsewhere two rows of blocks are in memory as float32.
    """
    if has_kernel(weights_NK):
        quantize_blocks(weights_NK, values_NK, scales_nk, BLOCK, _FP8_MAX, _MIN_AMAX)
        return
    num_columns = weights_NK.shape[1]
    for first, scales_k in zip(range(0, len(weights_NK), BLOCK), scales_nk, strict=True):
        band_RK = weights_NK[first : first + BLOCK].to(torch.float32)
        amax_K = torch.maximum(band_RK.amax(0), -band_RK.amin(0))
        amax_kB = pad(amax_K, (0, -num_columns % BLOCK)).view(-1, BLOCK)
        torch.div(amax_kB.amax(1).clamp_(min=_MIN_AMAX), _FP8_MAX, out=scales_k)
        factors_K = (1.0 / scales_k).repeat_interleave(BLOCK)[:num_columns]
        values_NK[first : first + BLOCK].copy_(band_RK * factors_K)


def dequantize_blocks(
    values_NK: Tensor, scales_nk: Tensor, dtype: torch.dtype, skipped: tuple[int, int] = (0, 0)
) -> Tensor:
    """Return values (float8_e4m3fn) times the scales (float32) of their blocks, rounded once.

    skipped   rows and columns of the first blocks that lie before the values
    """
    spread = scales_nk
    for axis, (first, size) in enumerate(zip(skipped, values_NK.shape, strict=True)):
        spread = spread.repeat_interleave(BLOCK, axis).narrow(axis, first, size)
    return torch.mul(values_NK.to(torch.float32), spread).to(dtype)
