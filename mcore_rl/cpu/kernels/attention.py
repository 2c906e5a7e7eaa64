"""Causal attention over packed sequences by blocks of queries, without padding."""

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mcore_rl.cpu.kernels import call, usable
from mcore_rl.device.native import find_openblas, find_sgemm

_BLOCK = 64
"""BLOCK of native/attention.c."""


class _Packed(ctypes.Structure):
    """packed_t of native/attention.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("sequences", "heads", "kv_heads", "dim")),
        *((name, ctypes.c_void_p) for name in ("starts", "key_starts")),
        ("scale", ctypes.c_float),
        *((f"{name}_{axis}", ctypes.c_int64) for name in "qkv" for axis in ("stride", "head")),
    )


class _Gradient(ctypes.Structure):
    """gradient_t of native/attention.c."""

    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv")
    )


Lens = tuple[int, ...]


def takes_attention(q_Thd: Tensor, k_Kgd: Tensor, v_Kgd: Tensor) -> bool:
    """Return whether compiled code takes these tensors: values must be as wide as keys."""
    return usable(q_Thd, k_Kgd, v_Kgd) and v_Kgd.shape[2] == q_Thd.shape[2]


def causal_attention(
    q_Thd: Tensor,
    k_Kgd: Tensor,
    v_Kgd: Tensor,
    lens_N: Lens,
    scale: float,
    key_lens_N: Lens | None = None,
) -> Tensor:
    """Return causal attention within each sequence, [T, h * d], of float32 tensors.

    key_lens_N    of sequences whose last `lens_N` tokens alone are queries; None: all are
    """
    return _Attention.apply(q_Thd, k_Kgd, v_Kgd, (lens_N, key_lens_N or lens_N), scale)


@lru_cache(maxsize=64)
def _starts(lens_N: Lens) -> Tensor:
    return torch.tensor((0, *lens_N)).cumsum(0)


def _pack(q: Tensor, k: Tensor, v: Tensor, lens: tuple[Lens, Lens], scale: float) -> _Packed:
    sizes = (len(lens[0]), q.shape[1], k.shape[1], q.shape[2])
    strides = (stride for x in (q, k, v) for stride in x.stride()[:2])
    return _Packed(*sizes, *(_starts(lens_N).data_ptr() for lens_N in lens), scale, *strides)


def _sgemm() -> ctypes.c_void_p | None:
    """Return the product to call for blocks of queries, which OpenBLAS multiplies faster."""
    return find_openblas() or find_sgemm()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, lens: tuple[Lens, Lens], scale: float
    ) -> Tensor:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        out, lse = q.new_empty(len(q), q.shape[1] * q.shape[2]), q.new_empty(q.shape[:2])
        packed = _pack(q, k, v, lens, scale)
        scores = q.new_empty(torch.get_num_threads(), _BLOCK * max(lens[1]))
        arguments = (packed, q, k, v, scores, scores.stride(0), out, lse)
        call("attention", "attention", _sgemm(), *arguments)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.lens, ctx.scale = lens, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        dout = grads[0].contiguous()
        scores = q.new_empty(torch.get_num_threads(), 2 * _BLOCK * max(ctx.lens[1]))
        dq, dk, dv = q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
        packed = _pack(q, k, v, ctx.lens, ctx.scale)
        tensors = (q, k, v, out, lse, dout, dq, dk, dv)
        gradient = _Gradient(*(tensor.data_ptr() for tensor in tensors))
        arguments = (packed, gradient, scores, scores.stride(0))
        call("attention", "attention_backward", _sgemm(), *arguments)
        return dq, dk, dv, None, None
