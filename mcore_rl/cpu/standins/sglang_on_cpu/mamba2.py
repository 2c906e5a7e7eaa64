"""Mamba-2 layers and experts of Nemotron-H in torch, by SGLang's names and arguments.

Requests keep the state of a layer [H, P, N] in slots, as sgl_kernel/mamba.py has it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from sgl_kernel.mamba import causal_conv1d_fn_cpu, causal_conv1d_update_cpu
from torch import Tensor

from mcore_rl.cpu.mamba import run_scan


def scan_in_torch(nemotron_h: Any) -> None:
    """Run Mamba-2 layers, and the products of routers, in torch.

    SGLang has the kernels of a layer in triton, and on CPU not even their names. torch's products
    of another dtype than their factors are for GPUs. `nemotron_h` is SGLang's module of that name,
    which is imported only for such a model; import_models_when_asked calls this function then.
    """
    from sglang.srt.layers.attention.mamba import mamba

    names: Any = mamba
    names.causal_conv1d_fn_triton = causal_conv1d_fn_cpu
    names.causal_conv1d_update_triton = causal_conv1d_update_cpu
    names.mamba_chunk_scan_combined = scan_prompts
    names.selective_state_update = scan_tokens
    nemotron_h.NemotronHMoE._forward_core_normal = forward_experts


def scan_prompts(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    initial_states: Tensor | None,
    out: Tensor,
    state_dtype: torch.dtype,
    **_: Any,
) -> tuple[None, Tensor, None]:
    """Fill `out` [1, T, H, P] with the outputs of a batch's prompts.

    Returns (None, the states [prompts, H, P, N] behind them, None), where SGLang's kernel also has
    states on the way.
    """
    starts_N = cu_seqlens.tolist()
    step = F.softplus(dt.float() + dt_bias.float())
    empty = x.new_zeros(1, x.shape[2], x.shape[3], B.shape[3], dtype=torch.float32)
    states = []
    for i in range(len(starts_N) - 1):
        rows = slice(starts_N[i], starts_N[i + 1])
        before = empty if initial_states is None else initial_states[[i]].float()
        parts = (part[:, rows] for part in (x, step, B, C))
        outs, state = run_scan(*parts, A=A, D=D, state=before)
        out[:, rows] = outs.to(out.dtype)
        states.append(state.to(state_dtype))
    return None, torch.cat(states), None


def scan_tokens(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    *,
    z: None,
    dt_bias: Tensor,
    dt_softplus: bool,
    state_batch_indices: Tensor,
    out: Tensor,
) -> None:
    """Fill `out` [B, H, P] with the outputs of one more token of each request, and update states.

    Steps, decays and D are given for each output of a head, all alike.
    """
    assert z is None and dt_softplus, "gates are multiplied before the norm"
    slots_B = state_batch_indices.clamp(min=0).long()
    step = F.softplus(dt[..., 0].float() + dt_bias[..., 0].float())
    parts = (part[:, None] for part in (x, step, B, C))
    outs, states = run_scan(*parts, A=A[:, 0, 0], D=D[:, 0], state=state[slots_B].float())
    out.copy_(outs[:, 0])
    real_B = state_batch_indices >= 0
    state[slots_B[real_B]] = states[real_B].to(state.dtype)


def forward_experts(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the outputs of the routed experts, scaled, and of the shared expert.

    SGLang's native forward of experts leaves the scale to the model.
    """
    logits = F.linear(hidden_states.float(), self.gate.weight.float())
    shared = None if self.shared_experts is None else self.shared_experts(hidden_states)
    chosen = self.topk(hidden_states, logits)
    inputs = self._apply_fc1_latent_proj(hidden_states) if self.use_latent_moe else hidden_states
    scale = 1.0
    if not self.experts.should_fuse_routed_scaling_factor_in_topk:
        scale = self.routed_scaling_factor
    return self.experts(inputs, chosen) * scale, shared
