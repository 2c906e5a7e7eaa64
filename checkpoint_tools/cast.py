"""Converts bytes of elements to another dtype, by torch.

Imported only where elements are converted, so that commands that copy start without torch.
"""

from typing import Any

import torch
from torch import Tensor

from mcore_rl.weights.hf.fp8 import count_blocks
from mcore_rl.weights.hf.int4 import PACKED_DTYPE
from mcore_rl.weights.hf.int4_groups import dequantize_groups, quantize_changed
from mcore_rl.weights.hf.quantize import quantize_into


def cast(data: memoryview, dtype: str, to: str) -> memoryview:
    """Convert elements of `dtype` to `to`, rounding to nearest even. Peak memory: the result."""
    return view_bytes(_view(data, dtype).to(getattr(torch, to)))


def quantize(data: memoryview, dtype: str, num_columns: int) -> tuple[memoryview, memoryview]:
    """Quantize whole rows of blocks; return (8-bit values, float32 scales) as bytes.

    See mcore_rl/weights/hf/fp8.py for the formula.
    """
    weights_NK = _view(data, dtype).view(-1, num_columns)
    values_NK = torch.empty(weights_NK.shape, dtype=torch.float8_e4m3fn)
    scales_nk = torch.empty(
        count_blocks(len(weights_NK)), count_blocks(num_columns), dtype=torch.float32
    )
    quantize_into(weights_NK, values_NK, scales_nk)
    return view_bytes(values_NK), view_bytes(scales_nk)


def unpack_int4(words: memoryview, scales: memoryview, dtype: str) -> memoryview:
    """Return the elements that INT4 words and the scales of their groups encode, in `dtype`."""
    packed_W = _view(words, PACKED_DTYPE)
    return view_bytes(dequantize_groups(packed_W, _view(scales, dtype)))


def quantize_int4(
    data: memoryview, dtype: str, words: memoryview, scales: memoryview, scale_dtype: str
) -> tuple[memoryview, memoryview]:
    """Quantize whole groups to INT4 and return (words, scales) as bytes.

    words, scales   of the same elements before; groups that did not change keep them
    """
    before = _view(words, PACKED_DTYPE)[None], _view(scales, scale_dtype)[None]
    packed_NW, scales_NG = quantize_changed(_view(data, dtype)[None], *before)
    return view_bytes(packed_NW), view_bytes(scales_NG)


def _view(data: memoryview, dtype: str) -> Tensor:
    return torch.frombuffer(data, dtype=getattr(torch, dtype))


def view_bytes(tensor: Tensor) -> memoryview:
    """Return a view of a contiguous tensor's bytes."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array).cast("B")
