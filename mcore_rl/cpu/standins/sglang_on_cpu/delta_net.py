"""Gated delta nets in torch: the norm of outputs, and which states drafts leave behind.

sgl_kernel/mamba.py has all else of them.
"""

from typing import Any

from torch import Tensor
from torch.nn.functional import rms_norm, silu


def norm_gated_outputs() -> None:
    """Normalize a delta net's outputs, and multiply them with their gate, in torch.

    SGLang does it in triton kernels, one for Qwen3-Next and one for Qwen3.5, or on CPU with Intel
    AMX.
    """
    from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
    from sglang.kernels.ops.attention.fla.layernorm_gated import RMSNorm

    def norm_gated(self: Any, x: Tensor, gate: Tensor) -> Tensor:
        assert self.activation in ("silu", "swish"), self.activation
        normed = rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps)
        return (normed * silu(gate.float())).to(x.dtype)

    def norm_before_gate(self: Any, x: Tensor, z: Tensor) -> Tensor:
        assert self.norm_before_gate and self.group_size is None, (
            self.norm_before_gate,
            self.group_size,
        )
        return norm_gated(self, x, z)

    FusedRMSNormGated.forward = norm_gated
    RMSNorm.forward = norm_before_gate


def keep_accepted_states() -> None:
    """Copy the states behind the last accepted drafts in torch; SGLang does it in triton kernels.

    SGLang has the same in torch, and uses it for states of other layers.
    """
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as module

    copy = module.HybridLinearAttnBackend._scatter_speculative_state_with_mask

    def scatter_states(
        caches: Any,
        slots_B: Tensor,
        steps_B: Tensor,
        track_slots_B: Tensor | None,
        track_steps_B: Tensor | None,
        src_indices_raw: Tensor | None = None,
    ) -> None:
        pairs = zip(caches.conv, caches.intermediate_conv_window, strict=True)
        for states, behind_drafts in [(caches.temporal, caches.intermediate_ssm), *pairs]:
            copy(states, behind_drafts, slots_B, steps_B, src_indices_raw)
            if track_slots_B is not None and track_steps_B is not None:
                copy(states, behind_drafts, track_slots_B, track_steps_B, src_indices_raw)

    module.scatter_mamba_states_after_mtp_verify = scatter_states
