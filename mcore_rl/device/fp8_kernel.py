"""Quantizes a matrix to 8-bit values with a scale per block, in one Triton kernel.

The kernel reads every element once; torch takes six passes over a band of blocks, each a kernel of
its own. mcore_rl/weights/hf/fp8.py describes the format.
"""

from importlib.util import find_spec
from typing import Any

from torch import Tensor


def has_kernel(matrix: Tensor) -> bool:
    """Return whether `quantize_blocks` can run where the matrix lies."""
    return matrix.is_cuda and find_spec("triton") is not None


def quantize_blocks(
    weights_NK: Tensor,
    values_NK: Tensor,
    scales_nk: Tensor,
    block: int,
    fp8_max: float,
    min_amax: float,
) -> None:
    """Fill `values_NK` (float8_e4m3fn) and `scales_nk` (float32) from `weights_NK`, block by block.

    A scale is max(largest magnitude, min_amax) / fp8_max, and NaN for a block with a NaN. All three
    may be strided views. Bit for bit what weights/hf/fp8.py computes with torch.
    """
    num_rows, num_columns = weights_NK.shape
    from mcore_rl.device import triton_kernels

    kernel: Any = triton_kernels.quantize
    kernel[tuple(scales_nk.shape)](
        weights_NK,
        values_NK,
        scales_nk,
        num_rows,
        num_columns,
        *weights_NK.stride(),
        *values_NK.stride(),
        *scales_nk.stride(),
        fp8_max,
        min_amax,
        BLOCK=block,
    )
