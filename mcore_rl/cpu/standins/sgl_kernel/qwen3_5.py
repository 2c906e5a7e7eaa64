"""Torch versions of sgl_kernel's functions for Qwen3.5's attention, by SGLang's names."""

import torch
from torch import Tensor
from torch.nn.functional import rms_norm


def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    """Multiply `x` with the sigmoid of its gate, in place."""
    x.copy_(x.float() * gate.float().sigmoid())


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (queries, keys, gates), a row per token and head; the norms multiply with 1 + weight.

    In `q_gate` [T, heads * 2 * head_dim] the gate of a head lies behind its queries.
    """
    q, gate = q_gate.view(-1, num_heads, 2 * head_dim).chunk(2, -1)
    parts = ((q, q_weight), (k, k_weight))
    normed_q, normed_k = (_normalize(x.reshape(-1, head_dim), weight, eps) for x, weight in parts)
    return normed_q, normed_k, gate.reshape(-1, head_dim).contiguous()


def _normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x.float(), x.shape[-1:], 1.0 + weight.float(), eps).to(x.dtype)


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Tensor, ba: Tensor, key_heads: int, heads: int, head_k: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (queries, keys and values [T, D], gates z [T, H, V], b and a [T, H])."""
    qkv, z = torch.split(qkvz, [2 * key_heads * head_k + heads * head_v, heads * head_v], -1)
    b, a = torch.split(ba, [heads, heads], -1)
    return qkv.contiguous(), z.reshape(-1, heads, head_v), b.contiguous(), a.contiguous()
