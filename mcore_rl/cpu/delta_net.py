"""Torch versions of the kernels of flash-linear-attention that megatron-core's delta net calls.

They take packed sequences. Each sequence begins with an empty state:

    x            inputs of a causal convolution [B, T, D]
    q, k, v      queries and keys [B, T, H, K], values [B, T, H, V]
    g, beta      logarithm of the state's decay, and rate of its change [B, T, H]
    cu_seqlens   0, 3, 7: tokens 0-2 and 3-6 are sequences

Source of the equations: arXiv:2412.06464, section 3.3 (chunks), and arXiv:2406.06484, equations 6
to 9 (inverse of a triangular matrix).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_LEN = 64


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Return x / sqrt(sum(x^2) + eps), with the sum over the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Return the convolution of each channel, [B, T, D], over a token and those before it.

    weight   [D, W]; its last column is multiplied with the token itself
    """
    assert initial_state is None and not output_final_state, "sequences are whole"
    parts_BTD = [
        _convolve(part_BTD, weight, bias) for part_BTD in x.split(_list_lens(x, cu_seqlens), 1)
    ]
    out_BTD = torch.cat(parts_BTD, 1)
    return (F.silu(out_BTD) if activation in ("silu", "swish") else out_BTD), None


def _convolve(x_BTD: Tensor, weight_DW: Tensor, bias_D: Tensor | None) -> Tensor:
    num_channels, width = weight_DW.shape
    padded_BDT = F.pad(x_BTD.transpose(1, 2), (width - 1, 0))
    return F.conv1d(padded_BDT, weight_DW[:, None], bias_D, groups=num_channels).transpose(1, 2)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the outputs [B, T, H, V] of the gated delta rule.

    The state S [K, V] of a head starts at 0 in each sequence; token t makes it
    exp(g) (1 - beta k k^T) S + beta k v^T, and reads scale * q^T S.
    """
    assert initial_state is None and not output_final_state, "sequences are whole"
    if use_qk_l2norm_in_kernel:
        q = l2norm(q)
        k = l2norm(k)
    scaled = q * (k.shape[-1] ** -0.5 if scale is None else scale)
    lens_N = _list_lens(v, cu_seqlens)
    by_head = [x.float().transpose(1, 2).split(lens_N, 2) for x in (scaled, k, v, g, beta)]
    empty = v.new_zeros(len(v), v.shape[2], k.shape[-1], v.shape[-1], dtype=torch.float32)
    outs = [run_delta_rule(*sequence, state=empty)[0] for sequence in zip(*by_head, strict=True)]
    return torch.cat(outs, 2).transpose(1, 2).to(v.dtype).contiguous(), None


def _list_lens(x: Tensor, cu_seqlens: Tensor | None) -> list[int]:
    return [x.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()


def run_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, H, T, V] of one sequence, and the state [B, H, K, V] behind it.

    `q` is scaled, all are float32 and have their heads before their tokens. Within a chunk, token i
    sees token j <= i through the decay exp(g_j+1 + ... + g_i). The chunk's updates of the state
    solve a lower triangular system with ones on its diagonal.
    """
    outs = []
    for first in range(0, q.shape[2], CHUNK_LEN):
        chunk = slice(first, first + CHUNK_LEN)
        q_i, k_i, v_i = q[:, :, chunk], k[:, :, chunk], v[:, :, chunk]
        beta_i = beta[:, :, chunk, None]
        log_decay = g[:, :, chunk].cumsum(-1)
        between = (log_decay[..., :, None] - log_decay[..., None, :]).tril().exp().tril()
        since_start = log_decay.exp()[..., None]
        to_end = (log_decay[..., -1:] - log_decay).exp()[..., None]
        system = (beta_i * k_i @ k_i.mT * between).tril(-1)
        known = beta_i * (v_i - since_start * k_i @ state)
        updates = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
        outs.append(since_start * q_i @ state + (q_i @ k_i.mT * between) @ updates)
        state = since_start[..., -1:, :] * state + (to_end * k_i).mT @ updates
    return torch.cat(outs, 2), state
