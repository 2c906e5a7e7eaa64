"""Block-FP8 quantization of whole matrices: DeepSeek's own function, and its inverse."""

import torch
from torch import Tensor


def per_block_cast_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """As in DeepGEMM (deep_gemm/utils/math.py), without scales rounded to powers of two."""
    m, n = x.shape
    x_padded = torch.zeros((-(-m // 128) * 128, -(-n // 128) * 128), dtype=x.dtype)
    x_padded[:m, :n] = x
    x_view = x_padded.view(-1, 128, x_padded.size(1) // 128, 128)
    x_amax = x_view.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4)
    sf = x_amax / 448.0
    x_scaled = (x_view * (1.0 / sf)).to(torch.float8_e4m3fn)
    return x_scaled.view_as(x_padded)[:m, :n].contiguous(), sf.view(x_view.size(0), x_view.size(2))


def dequantize(values_NK: Tensor, scales_nk: Tensor) -> Tensor:
    """float32; as weight_dequant in DeepSeek-V3's inference/kernel.py."""
    rows, columns = values_NK.shape
    scales_NK = scales_nk.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return values_NK.float() * scales_NK
