"""Torch versions of sgl_kernel's functions for gated delta nets, by SGLang's names and arguments.

Requests keep their states in slots, each function begins with that of its slot and leaves it there:

    convolution   conv_states [slots, D, W - 1]   the last inputs of a channel
    delta rule    states [slots, H, V, K]         H value heads; the transpose of cpu/delta_net.py's

A slot of -1 is padding of a batch. Where a request has drafts, its slot stays as it is, and the
state behind each of them is kept apart, [requests, drafts, ...]: SGLang copies the state behind
the last one that is accepted. Drafts are chains here, not trees.
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
    x: Tensor,
    conv_states: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    activation: str | None,
    conv_state_indices: Tensor,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    **links: Tensor | None,
) -> Tensor:
    """Return the convolution of one more token of each request, [B, D], or of drafts, [B, D, T].

    x has the same shape. The last inputs behind each draft are written to intermediate_conv_window
    [requests, T, D, W - 1], in the rows of intermediate_state_indices. `links` are those of trees.
    """
    assert all(link is None for link in links.values()), "drafts are chains here"
    slots_B = conv_state_indices.clamp(min=0).long()
    x_BDT = x[..., None] if x.dim() == 2 else x
    before = conv_states[slots_B]
    out, states = _convolve(x_BDT, weight_DW, bias_D, activation, before)
    real_B = conv_state_indices >= 0
    if intermediate_conv_window is None:
        conv_states[slots_B[real_B]] = states[real_B].to(conv_states.dtype)
        return out[..., 0]
    assert intermediate_state_indices is not None
    rows_B = intermediate_state_indices[: len(slots_B)].long()[real_B]
    inputs = torch.cat([before.to(x_BDT.dtype), x_BDT], -1)[real_B]
    width = before.shape[-1]
    for draft in range(x_BDT.shape[-1]):
        window = inputs[..., draft + 1 : draft + 1 + width]
        intermediate_conv_window[rows_B, draft] = window.to(conv_states.dtype)
    return out.mT.contiguous().mT  # SGLang views it with drafts before channels


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
    is_kda: bool = False,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    cache_steps: int = 1,
    retrieve_parent_token: Tensor | None = None,
) -> Tensor:
    """Return the outputs [1, B * T, H, V] of one more token of each request, or of T drafts.

    The states behind each of `cache_steps` drafts are written to intermediate_states_buffer
    [requests, T, H, V, K], in the rows of intermediate_state_indices.
    """
    assert not is_kda and retrieve_parent_token is None, "drafts are chains here"
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    slots_B = initial_state_indices.clamp(min=0).long()
    parts = [x[0].unflatten(0, (len(slots_B), cache_steps)) for x in (q, k, v, g, beta)]
    states = initial_state_source[slots_B]
    real_B = initial_state_indices >= 0
    outs = []
    for step in range(cache_steps):
        out, states = _run(*(part[:, step : step + 1] for part in parts), states)
        outs.append(out)
        if intermediate_states_buffer is not None and intermediate_state_indices is not None:
            rows_B = intermediate_state_indices[: len(slots_B)].long()[real_B]
            kept = states[real_B].to(intermediate_states_buffer.dtype)
            intermediate_states_buffer[rows_B, step] = kept
    if not disable_state_update:
        initial_state_source[slots_B[real_B]] = states[real_B].to(initial_state_source.dtype)
    return torch.cat(outs, 1).flatten(0, 1)[None]


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
