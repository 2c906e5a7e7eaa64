"""The norm of a Mamba-2 layer's outputs in torch, as a module of megatron-core."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class GatedNorm(torch.nn.Module):
    """RMSNormGated of mamba_ssm: an RMSNorm of each group of outputs, whose gates come before."""

    def __init__(
        self,
        hidden_size: int,
        *,
        eps: float,
        group_size: int,
        norm_before_gate: bool,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        assert not norm_before_gate, "gates are multiplied before the norm"
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self._eps = eps
        self._group_size = group_size
        self.tp_group: Any = None

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Return the norm [..., D] of x, or of x * silu(z)."""
        gated = x.float() if z is None else x.float() * F.silu(z.float())
        grouped = gated.unflatten(-1, (-1, self._group_size))
        normed = F.rms_norm(grouped, grouped.shape[-1:], eps=self._eps).flatten(-2)
        return (normed * self.weight.float()).to(x.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return the weight, whose rows tensor parallelism cuts."""
        return make_sharded_tensors_for_checkpoint(
            {"weight": self.weight},
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )
