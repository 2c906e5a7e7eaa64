"""RMSNorm (arXiv:1910.07467) in one pass."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl.cpu.kernels import call, usable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last axis, of the shape of x."""
    if usable(x, weight):
        return _RmsNorm.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


class RmsNorm(torch.nn.RMSNorm):
    """torch's module, computed by `rms_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None, "megatron-core gives every norm its epsilon"
        return rms_norm(x, self.weight, self.eps)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        size = x.shape[-1]
        rows = x.numel() // size
        y, scale = torch.empty_like(x), x.new_empty(rows)
        call("layers", "rms_norm", rows, size, x, weight, eps, y, scale)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, scale = ctx.saved_tensors
        dx, dweight = torch.empty_like(x), torch.zeros_like(weight)
        size = x.shape[-1]
        arguments = (grads[0].contiguous(), x, weight, scale, dx, dweight)
        call("layers", "rms_norm_backward", len(scale), size, *arguments)
        return dx, dweight, None
