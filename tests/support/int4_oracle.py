"""INT4 matrices that compressed-tensors quantizes, by scales that it computes."""

import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

from mcore_rl.weights.hf.int4 import GROUP

ARGUMENTS = QuantizationArgs(num_bits=4, group_size=GROUP, strategy="group", symmetric=True)
SCHEME = QuantizationScheme(targets=["Linear"], weights=ARGUMENTS)


def find_library_scales(weights: Tensor) -> Tensor:
    groups = weights.unflatten(-1, (-1, GROUP))
    scales, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), ARGUMENTS)
    return scales


def compress_with_library(weights: Tensor) -> dict[str, Tensor]:
    """Return the tensors that a file has of the matrix, by the last part of their names."""
    state = {"weight": weights, "weight_scale": find_library_scales(weights)}
    packed = PackedQuantizationCompressor.compress(state, SCHEME)
    packed["weight_shape"] = packed["weight_shape"].to(torch.int32)  # as published
    return packed


def decompress_with_library(parts: dict[str, Tensor]) -> Tensor:
    """Return the matrix that such tensors encode."""
    return PackedQuantizationCompressor.decompress(parts, SCHEME)["weight"]
