"""RMSNorm, rotary embedding and SwiGLU, each in one pass over memory.

Sources: arXiv:1910.07467, arXiv:2104.09864, arXiv:2002.05202.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl.cpu.kernels import call, usable

_TABLES = "_mcore_rl_rotary_tables"


def rotary(
    x: Tensor, freqs: Tensor, lens_N: tuple[int, ...], mscale: float, by_token: bool
) -> Tensor | None:
    """Return x turned by the angles of its tokens' positions, [T, h, d]; None for other angles.

    x          float32 [T, h, d]
    freqs      angles [positions, 1, 1, rotary], whose halves are equal
    lens_N     lengths of the packed sequences
    mscale     factor of cosines and sines
    by_token   row t of the angles is that of token t, not of the t-th position of a sequence
    """
    tables = _tables(freqs, mscale)
    if tables is None:
        return None
    return _Rotary.apply(x, *tables, _positions(lens_N, by_token), freqs.shape[-1])


def _tables(freqs: Tensor, mscale: float) -> tuple[Tensor, Tensor] | None:
    """Return (cosines, sines) of the first half of the angles; they are kept with the angles."""
    kept = getattr(freqs, _TABLES, None)
    if kept is None or kept[0] != mscale:
        first, second = freqs.detach().reshape(len(freqs), -1).float().chunk(2, -1)
        is_plain = freqs.shape[1:-1].numel() == 1 and torch.equal(first, second)
        tables = (first.cos() * mscale, first.sin() * mscale) if is_plain else None
        kept = (mscale, tables)
        setattr(freqs, _TABLES, kept)
    return kept[1]


@lru_cache(maxsize=64)
def _positions(lens_N: tuple[int, ...], by_token: bool) -> Tensor:
    if by_token:
        return torch.arange(sum(lens_N))
    return torch.cat([torch.arange(num_tokens) for num_tokens in lens_N])


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor, positions_T: Tensor, turned: int
    ) -> Tensor:
        ctx.tables, ctx.positions_T, ctx.turned = (cosines, sines), positions_T, turned
        return _turn(x, (cosines, sines), positions_T, turned, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dx = _turn(grads[0], ctx.tables, ctx.positions_T, ctx.turned, -1.0)
        return dx, None, None, None, None


def _turn(
    x: Tensor, tables: tuple[Tensor, Tensor], positions_T: Tensor, turned: int, direction: float
) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    y = x.new_empty(x.shape)
    strides = x.stride()[:2]
    call("layers", "rotary", *x.shape, turned, *strides, x, positions_T, *tables, direction, y)
    return y


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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, with the mean over the last axis."""
    if usable(x, weight):
        return _RmsNorm.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def zero_centered_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * (1 + weight), computed in float32."""
    return rms_norm(x.float(), 1.0 + weight.float(), eps).to(x.dtype)


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
