"""Products of matrices by numpy's OpenBLAS, where that is faster than torch's library."""

from typing import Any

import torch
from torch import Tensor

from mcore_rl.cpu.kernels import call, usable
from mcore_rl.device.native.blas import find_openblas

_FEW_ROWS = 256
"""OpenBLAS is slower for fewer rows times weights as [outputs, inputs]."""


def matmul(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a [m, k] times b [k, n], written to `out`, contiguous, if that is given."""
    openblas = find_openblas()
    is_turned = [_is_turned(x) for x in (a, b)]
    is_slower = is_turned[1] and len(a) < _FEW_ROWS
    if openblas is None or None in is_turned or is_slower or not usable(a, b):
        return torch.mm(a, b, out=out)
    out = a.new_empty(len(a), b.shape[1]) if out is None else out
    sizes = (torch.get_num_threads(), *out.shape, len(b))
    call("matmul", "matmul", openblas, *sizes, a, is_turned[0], b, is_turned[1], out)
    return out


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [..., inputs] times weight [outputs, inputs], transposed."""
    return _Linear.apply(x, weight)


def _is_turned(x: Tensor) -> bool | None:
    """Return whether x is the transpose of a contiguous matrix; None: neither it nor x is one."""
    if x.is_contiguous():
        return False
    return True if x.t().is_contiguous() else None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return matmul(x.flatten(0, -2), weight.t()).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        dout = grads[0].flatten(0, -2).contiguous()
        dx = matmul(dout, weight).view(x.shape)
        return dx, matmul(dout.t(), x.flatten(0, -2))
