"""Torch versions of sgl_kernel's functions for gated delta nets, by SGLang's names and arguments.

Requests keep their states in slots, each function begins with that of its slot and leaves it there:

    convolution   conv_states [slots, D, W - 1]   the last inputs of a channel
    delta rule    states [slots, H, V, K]         H value heads; the transpose of cpu/delta_net.py's

A slot of -1 is padding of a batch.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl.cpu.delta_net import l2norm, run_delta_rule


def causal_conv1d_fn_cpu(
    x_DT: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    activation: str | None,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_: Any,
) -> Tensor:
    """Return the convolution [D, T] of the prompts of a batch, each behind what its slot holds."""
    starts_N = query_start_loc.tolist()
    outs = []
    for i, slot in enumerate(cache_indices.tolist()):
        x_Dt = x_DT[:, starts_N[i] : starts_N[i + 1]]
        before = conv_states[slot] if slot >= 0 and has_initial_state[i] else None
        out, state = _convolve(x_Dt[None], weight_DW, bias_D, activation, before)
        outs.append(out[0])
        if slot >= 0:
            conv_states[slot] = state[0].to(conv_states.dtype)
    return torch.cat(outs, 1)


def causal_conv1d_update_cpu(
    x_BD: Tensor,
    conv_states: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    activation: str | None,
    conv_state_indices: Tensor,
) -> Tensor:
    """Return the convolution [B, D] of one more token of each request."""
    slots_B = conv_state_indices.clamp(min=0).long()
    out, states = _convolve(x_BD[..., None], weight_DW, bias_D, activation, conv_states[slots_B])
    real_B = conv_state_indices >= 0
    conv_states[slots_B[real_B]] = states[real_B].to(conv_states.dtype)
    return out[..., 0]


def _convolve(
    x_BDT: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    activation: str | None,
    before: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return (outputs [B, D, T], the last W - 1 inputs [B, D, W - 1]); `before` are those before x.

    None stands for zeros.
    """
    num_channels, width = weight_DW.shape
    if before is None:
        before = x_BDT.new_zeros(num_channels, width - 1)
    padded = torch.cat([before.to(x_BDT.dtype).expand(len(x_BDT), -1, -1), x_BDT], -1)
    out = F.conv1d(padded, weight_DW[:, None], bias_D, groups=num_channels)
    if activation in ("silu", "swish"):
        out = F.silu(out)
    return out, padded[..., padded.shape[-1] - (width - 1) :]


def fused_gdn_gating_cpu(
    A_log_H: Tensor, a_TH: Tensor, b_TH: Tensor, dt_bias_H: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (logarithm of the decay in float32, rate of change), each [1, T, H]."""
    decay = -A_log_H.float().exp() * F.softplus(a_TH.float() + dt_bias_H.float())
    return decay[None], b_TH.sigmoid()[None]


def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    initial_state_indices: Tensor,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """Return the outputs [1, T, H, V] of the prompts of a batch.

    Queries and keys are normalized here; each of their heads serves equally many value heads.
    """
    starts_N = cu_seqlens.tolist()
    out = torch.empty_like(v)
    for i, slot in enumerate(initial_state_indices.tolist()):
        rows = slice(starts_N[i], starts_N[i + 1])
        states = initial_state[[max(slot, 0)]]
        parts = (x[:, rows] for x in (q, k, v, g, beta))
        out[:, rows], states = _run(*parts, states)
        if slot >= 0:
            initial_state[slot] = states[0].to(initial_state.dtype)
    return out, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
) -> Tensor:
    """Return the outputs [1, B, H, V] of one more token of each request."""
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    slots_B = initial_state_indices.clamp(min=0).long()
    parts = (x.transpose(0, 1) for x in (q, k, v, g, beta))
    out, states = _run(*parts, initial_state_source[slots_B])
    real_B = initial_state_indices >= 0
    initial_state_source[slots_B[real_B]] = states[real_B].to(initial_state_source.dtype)
    return out.transpose(0, 1).contiguous()


def _run(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (outputs [B, T, H, V], states [B, H, V, K]); inputs are [B, T, ...]."""
    repeats = v.shape[2] // k.shape[2]
    q = (l2norm(q.float()) * k.shape[-1] ** -0.5).repeat_interleave(repeats, 2)
    k = l2norm(k.float()).repeat_interleave(repeats, 2)
    by_head = (x.float().transpose(1, 2) for x in (q, k, v, g, beta))
    out, states = run_delta_rule(*by_head, states.float().mT)
    return out.transpose(1, 2).to(v.dtype), states.mT
