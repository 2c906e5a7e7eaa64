"""Rotary embedding (arXiv:2104.09864) of packed sequences in one pass."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mcore_rl.cpu.kernels import call

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
