"""The norm of a gated delta net's outputs in torch; sgl_kernel/mamba.py has all else of it."""

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
