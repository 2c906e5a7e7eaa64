"""SwiGLU (arXiv:2002.05202) with a weight for each row, in one pass."""

from typing import Any

import torch
from torch import Tensor

from mcore_rl.cpu.kernels import call


def swiglu(x: Tensor, weights: Tensor | None) -> Tensor:
    """Return silu(gate) * up * weight, [T, I]; x is float32 [T, 2 I], gate before up.

    weights    [T, 1], or None for 1
    """
    return _Swiglu.apply(x, weights)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None) -> Tensor:
        x = x.contiguous()
        weights = None if weights is None else weights.contiguous()
        y = x.new_empty(len(x), x.shape[1] // 2)
        call("layers", "swiglu", *y.shape, x, weights, y)
        ctx.save_for_backward(x, weights)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weights = ctx.saved_tensors
        dy, dx = grads[0].contiguous(), torch.empty_like(x)
        dweights = None if weights is None else torch.empty_like(weights)
        call("layers", "swiglu_backward", *dy.shape, dy, x, weights, dx, dweights)
        return dx, dweights
