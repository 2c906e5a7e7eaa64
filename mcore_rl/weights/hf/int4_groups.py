"""Packs and unpacks groups of INT4 weights, of whole matrices or of slices of them.

Shapes: N rows, K columns, W = K / 8 words, G = K / 32 groups of 32 values. Tensors begin and end
where a group does. Peak memory: three times the slice in bfloat16, six times where it is quantized.
"""

import torch
from torch import Tensor

from mcore_rl.weights.hf.int4 import GROUP, PER_WORD

_ZERO = 8
"""Added to a value to store it."""
_BYTES = torch.arange(256)
_PAIRS = torch.stack([(_BYTES & 15) - _ZERO, (_BYTES >> 4) - _ZERO], 1).to(torch.bfloat16)
"""The two values in every byte. A lookup takes a quarter of the time of shifts."""
_PAIRS_AS_WORDS = _PAIRS.view(torch.int32)[:, 0].contiguous()
_STEPS = 7.5
"""Half of the 15 steps between the least and the largest value."""
_EPSILON = torch.finfo(torch.bfloat16).eps


def unpack_values(packed_NW: Tensor) -> Tensor:
    """Return the values from -8 to 7 of 32-bit words, bfloat16 [N, 8 * W]."""
    bytes_B = packed_NW.contiguous().view(torch.uint8).flatten().to(torch.int32)
    pairs_B = _PAIRS_AS_WORDS.to(packed_NW.device).index_select(0, bytes_B)
    return pairs_B.view(torch.bfloat16).view(*packed_NW.shape[:-1], -1)


def pack_values(values_NK: Tensor) -> Tensor:
    """Return the 32-bit words of values from -8 to 7, int32 [N, K / 8]."""
    stored_NK = (values_NK + _ZERO).to(torch.uint8)
    return (stored_NK[..., ::2] | stored_NK[..., 1::2] << 4).view(torch.int32)


def dequantize_groups(packed_NW: Tensor, scales_NG: Tensor) -> Tensor:
    """Return the weights [N, K] in the scales' dtype, each product rounded once."""
    values_NGV = unpack_values(packed_NW).unflatten(-1, (-1, GROUP))
    return (values_NGV.to(scales_NG.dtype) * scales_NG[..., None]).flatten(-2)


def quantize_groups(weights_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return (packed words, bfloat16 scales) of a matrix, which is rounded to bfloat16 first.

    The scale of a group is its largest magnitude / 7.5, that of zeros bfloat16's epsilon: the
    formula of compressed-tensors (calculate_qparams, symmetric), computed in bfloat16 as there. A
    group with NaN or infinity gets a scale that is not finite either, so that it stays visible.
    """
    groups_NGV = weights_NK.to(torch.bfloat16).unflatten(-1, (-1, GROUP))
    scales_NG = groups_NGV.abs().amax(-1) / _STEPS
    scales_NG = torch.where(scales_NG == 0, _EPSILON, scales_NG)
    scaled_NGV = (groups_NGV / scales_NG[..., None]).clamp(-8, 7).round()
    return pack_values(scaled_NGV.nan_to_num().flatten(-2)), scales_NG


def quantize_changed(
    weights_NK: Tensor, packed_NW: Tensor, scales_NG: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what `quantize_groups` does, but words and scales of groups that did not change.

    packed_NW, scales_NG   words and scales that the matrix had before
    A group is unchanged if all its weights, rounded to the scales' dtype, are what it encoded.
    Scales of published groups cannot be found again from weights, whose largest value may be any.
    """
    fresh_NW, fresh_NG = quantize_groups(weights_NK)
    before_NK = dequantize_groups(packed_NW, scales_NG)
    kept_NK = weights_NK.to(scales_NG.dtype) == before_NK
    kept_NG = kept_NK.unflatten(-1, (-1, GROUP)).all(-1)
    kept_NW = kept_NG.repeat_interleave(GROUP // PER_WORD, -1)
    return (
        torch.where(kept_NW, packed_NW, fresh_NW),
        torch.where(kept_NG, scales_NG, fresh_NG.to(scales_NG.dtype)),
    )
