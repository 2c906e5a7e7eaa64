"""The format of block-FP8 weights as DeepSeek-V3 publishes them: 8-bit values, a scale per block.

    X.weight [300, 256] bfloat16              X.weight             float8_e4m3fn  [300, 256]
    +-----------+-----------+                 X.weight_scale_inv   float32        [3, 2]
    | 128 x 128 | 128 x 128 |  rows 0-127
    +-----------+-----------+            ==>  weight ~= value * scale_inv of its block
    | 128 x 128 | 128 x 128 |  rows 128-255
    +-----------+-----------+                 The blocks at the lower and right edge may be smaller.
    |  44 x 128 |  44 x 128 |  rows 256-299
    +-----------+-----------+

Source: DeepSeek-V3 technical report (arXiv:2412.19437), section 3.3, and its published checkpoint.

Turns a matrix into 8-bit values and the scales of its blocks, in the format of fp8.py.

Shapes: N rows and K columns of the matrix, n and k rows and columns of blocks, R rows and B columns
of one block.
"""

from collections.abc import Mapping
from typing import Any

from mcore_rl.weights.box import Box

BLOCK = 128
"""Rows and columns of a block."""

FP8 = "float8_e4m3fn"
SCALE_DTYPE = "float32"
SCALE_BYTES = 4
QUANTIZATION_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
    "activation_scheme": "dynamic",
}
"""The "quantization_config" in config.json of a model with such weights."""

_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "fmt": (None, "e4m3", FP8),
    "activation_scheme": (None, "dynamic"),
    "weight_block_size": ([BLOCK, BLOCK],),
}
"""Key of quantization_config -> the values that can be read."""
_SCALE = "_scale_inv"
_WITHOUT_PROJ = ("w1", "w2", "w3", "wq_b", "wk")
"""Projections of experts and of indexers whose names do not say so."""


def is_block_fp8(quantization: Any) -> bool:
    """Return whether a `quantization_config` is that of weights in this format."""
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "fp8":
        return False
    return all(quantization.get(key) in values for key, values in _PLAIN.items())


def make_scale_name(name: str) -> str:
    """Return the HF name of the scales of the matrix `name`."""
    return name + _SCALE


def find_scaled_name(name: str) -> str | None:
    """Return the HF name of the matrix whose scales `name` holds, or None if it holds no scales."""
    return name.removesuffix(_SCALE) if name.endswith("weight" + _SCALE) else None


def count_blocks(size: int) -> int:
    """Return the blocks along an axis of `size` elements; the last block may be smaller."""
    return -(-size // BLOCK)


def make_scale_box(box: Box) -> Box:
    """Return the box of scales of the blocks in `box`, which must begin where a block begins."""
    start = tuple(at // BLOCK for at in box.start)
    return Box(make_scale_name(box.name), start, tuple(map(count_blocks, box.stop)))


def is_converted(name: str) -> bool:
    """Return whether DeepSeek's convention quantizes the HF tensor `name`.

    The projections of attention, MLPs, experts and indexers are quantized. Embeddings, output
    layer, norms, biases, the router and the weights of index heads are not.
    """
    module, _, kind = name.rpartition(".")
    projection = module.rpartition(".")[2]
    if kind != "weight" or projection == "weights_proj":
        return False
    return "_proj" in projection or projection in _WITHOUT_PROJ
