"""Matrix products by numpy's OpenBLAS where it is faster than torch's library, also of experts.

The rows of tokens go to their experts and back without a copy of all of them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_rl.cpu.kernels import call, usable
from mcore_rl.device.native import find_openblas

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


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows `index` of x, float32 [R, H]."""
    return _TakeRows.apply(x, index)


def add_rows(x: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """Return [num_rows, H], where row i of x, float32, is added to row index[i]."""
    return _AddRows.apply(x, index, num_rows)


def grouped_linear(x: Tensor, weights: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Return the rows of x, sorted by expert, times the weights of their experts, transposed.

    Expert i has `counts[i]` rows and weights [outputs, inputs].
    """
    return _GroupedLinear.apply(x, tuple(counts), *weights)


def _take(x: Tensor, index: Tensor) -> Tensor:
    y = x.new_empty(len(index), x.shape[1])
    call("layers", "take_rows", *y.shape, index, x.contiguous(), y)
    return y


def _add(x: Tensor, index: Tensor, num_rows: int) -> Tensor:
    y = x.new_empty(num_rows, x.shape[1])
    call("layers", "add_rows", *x.shape, index, x.contiguous(), num_rows, y)
    return y


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.index, ctx.num_rows = index, len(x)
        return _take(x, index)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _add(grads[0], ctx.index, ctx.num_rows), None


class _AddRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, num_rows: int) -> Tensor:
        ctx.index = index
        return _add(x, index, num_rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _take(grads[0], ctx.index), None, None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: tuple[int, ...], *weights: Tensor) -> Tensor:
        ctx.counts = counts
        ctx.save_for_backward(x, *weights)
        out = x.new_empty(len(x), len(weights[0]))
        parts = zip(x.split(counts), out.split(counts), weights, strict=True)
        for rows, out_rows, weight in parts:
            matmul(rows, weight.t(), out_rows)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *weights = ctx.saved_tensors
        dout, dx = grads[0].contiguous(), torch.empty_like(x)
        parts = zip(*(y.split(ctx.counts) for y in (x, dx, dout)), weights, strict=True)
        dweights = []
        for rows, drows, dout_rows, weight in parts:
            matmul(dout_rows, weight, drows)
            dweights.append(matmul(dout_rows.t(), rows))
        return dx, None, *dweights
