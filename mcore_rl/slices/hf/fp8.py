"""Block-FP8 weights as DeepSeek-V3 publishes them: a matrix in, its 8-bit values and its blocks' scales out.

    X.weight [300, 256] bfloat16                X.weight            float8_e4m3fn  [300, 256]
    ::::::::|::::::::  blocks of 128 x 128 -->  X.weight_scale_inv  float32        [3, 2]
    ::::::::|::::::::  the last may be          weight ~= values * scale_inv of their block
    ..      |          smaller

DeepSeek-V3 technical report (arXiv:2412.19437), section 3.3; names and layout are those of its checkpoint.
"""

from mcore_rl.slices.box import Box

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
"""What the config.json of a model with such weights has under "quantization_config"."""

_SCALE = "_scale_inv"


def scale_name(name: str) -> str:
    """HF name of the scales of the matrix `name`."""
    return name + _SCALE


def scaled_name(name: str) -> str | None:
    """HF name of the matrix whose scales `name` holds; None if it holds none."""
    return name.removesuffix(_SCALE) if name.endswith("weight" + _SCALE) else None


def num_blocks(size: int) -> int:
    return -(-size // BLOCK)


def scale_box(box: Box) -> Box:
    """The scales of the blocks that `box`, which begins with a block, lies in."""
    start = tuple(at // BLOCK for at in box.start)
    return Box(scale_name(box.name), start, tuple(map(num_blocks, box.stop)))


def is_converted(name: str) -> bool:
    """Whether the HF tensor is quantised by DeepSeek's convention: the projections of attention, MLPs and
    experts are; embeddings, output layer, norms, biases and the router are not.
    """
    module, _, kind = name.rpartition(".")
    projection = module.rpartition(".")[2]
    return kind == "weight" and ("_proj" in projection or projection in ("w1", "w2", "w3"))
