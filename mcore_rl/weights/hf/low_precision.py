"""Weights as engines in low precision compute with them: quantized, and dequantized again.

    fp8    every projection, in blocks of 128 x 128, as rollout.quantization=fp8 serves it  (fp8.py)
    int4   routed experts, in groups of 32 columns, as Kimi-K2.5 is published              (int4.py)

A block or group is rounded by itself, so a rank rounds its part of a matrix alone, if the part
consists of whole ones. Then the values are the same in every layout.
"""

from typing import Literal

import torch
from torch import Tensor

from mcore_rl.weights.box import Box, Shape
from mcore_rl.weights.hf.fp8 import BLOCK, FP8, count_blocks, is_converted
from mcore_rl.weights.hf.int4 import GROUP
from mcore_rl.weights.hf.int4_groups import dequantize_groups, quantize_groups
from mcore_rl.weights.hf.quantize import dequantize_blocks, quantize_into

Precision = Literal["fp8", "int4"]
Quantization = Literal["none"] | Precision
_PARTS = {"fp8": f"{BLOCK} x {BLOCK} blocks", "int4": f"groups of {GROUP} columns"}


def is_rounded(precision: Precision, name: str) -> bool:
    """Return whether engines of this precision hold the HF tensor `name` in it."""
    return is_converted(name) and (precision == "fp8" or ".experts." in name)


def check_whole(precision: Precision, box: Box, shape: Shape, holder: str) -> None:
    """Raise ValueError, naming tensor and `holder`, if the part of a matrix cuts a block or group.

    box     the part, of a matrix of this `shape`
    holder  who has the part: "trainer rank 3"
    """
    if not is_whole(precision, box.start, box.stop, shape):
        raise ValueError(
            f"{holder} holds {box.name!r} {box.start} to {box.stop} of {shape}, which cuts through"
            f" {_PARTS[precision]} of {precision} weights: choose tensor-parallel sizes that keep"
            " them whole"
        )


def is_whole(precision: Precision, start: Shape, stop: Shape, shape: Shape) -> bool:
    """Return whether the part from `start` to `stop` consists of whole blocks or groups."""
    sizes = (BLOCK, BLOCK) if precision == "fp8" else (1, GROUP)
    ends = zip(stop, shape, sizes, strict=True)
    may_end = precision == "fp8"  # A block at the edge may be smaller, a group may not.
    begins_whole = not any(at % size for at, size in zip(start, sizes, strict=True))
    return begins_whole and all(at % size == 0 or (may_end and at == end) for at, end, size in ends)


def round_weights(precision: Precision, weights_NK: Tensor) -> Tensor:
    """Return the matrix after quantization and dequantization, in its own dtype.

    `weights_NK` must consist of whole blocks or groups (`check_whole`).
    """
    if precision == "int4":
        return dequantize_groups(*quantize_groups(weights_NK)).to(weights_NK.dtype)
    values_NK = torch.empty_like(weights_NK, dtype=getattr(torch, FP8))
    num_blocks = tuple(map(count_blocks, weights_NK.shape))
    scales_nk = torch.empty(num_blocks, device=weights_NK.device)
    quantize_into(weights_NK, values_NK, scales_nk)
    return dequantize_blocks(values_NK, scales_nk, weights_NK.dtype)
