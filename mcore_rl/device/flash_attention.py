"""Attention with sinks over packed sequences, by kernels that know no sinks.

Transformer Engine 2.11 has no kernel for both. A sink is a logit that joins each query's softmax
without a value (arXiv:2309.17453), so it only scales the output. With l the logarithm of a query's
sum of exponentials, s the sink and O the output without it:

    l' = log(exp(l) + exp(s))       O' = O * exp(l - l')

The kernel's backward pass gets O' and l' in place of O and l. It computes probabilities as
exp(logit - l') and their gradient as P * (dP - rowsum(dO' * O')), which is that of the softmax with
a sink. The sink's own gradient is -exp(s - l') * rowsum(dO' * O').

Axes: T tokens of all sequences end to end, h query heads, g key heads, d head dimension.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class AttentionKernel(Protocol):
    """Causal attention of packed sequences; its backward pass takes any output and log-sum."""

    def forward(self, q_Thd: Tensor, k_Tgd: Tensor, v_Tgd: Tensor, /) -> tuple[Tensor, Tensor, Any]:
        """Return (output [T, h, d], float32 log of the sum of exponentials [h, T], state)."""
        ...

    def backward(
        self, grad_Thd: Tensor, qkv: tuple[Tensor, ...], out: Tensor, lse_hT: Tensor, state: Any, /
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v."""
        ...


@dataclass(frozen=True)
class TorchFlash:
    """The flash attention that comes with torch, in half precision on CUDA.

    cu_seqlens_N1   int32, cumulative lengths of the sequences
    cu_keys_N1      the same of their keys; the last query of a sequence sees its last key
    max_len         most queries of a sequence
    max_keys        most keys
    window          number of earlier tokens that a token sees; None means all
    """

    cu_seqlens_N1: Tensor
    cu_keys_N1: Tensor
    max_len: int
    max_keys: int
    scale: float
    window: int | None = None

    @staticmethod
    def of(params: Any, scale: float, window: int | None) -> "TorchFlash":
        """Take the lengths of megatron-core's PackedSeqParams."""
        return TorchFlash(
            params.cu_seqlens_q,
            params.cu_seqlens_kv,
            params.max_seqlen_q,
            params.max_seqlen_kv,
            scale,
            window,
        )

    def forward(self, q_Thd: Tensor, k_Tgd: Tensor, v_Tgd: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Run the kernel; the state is what its backward pass wants back."""
        out, lse_hT, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
            q_Thd, k_Tgd, v_Tgd, *self._lens(), 0.0, True, False, **self._options()
        )
        return out, lse_hT, (rng_state, unused)

    def backward(
        self, grad_Thd: Tensor, qkv: tuple[Tensor, ...], out: Tensor, lse_hT: Tensor, state: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the kernel's backward pass."""
        return torch.ops.aten._flash_attention_backward(
            grad_Thd, *qkv, out, lse_hT, *self._lens(), 0.0, True, *state, **self._options()
        )

    def _lens(self) -> tuple[Tensor, Tensor, int, int]:
        return self.cu_seqlens_N1, self.cu_keys_N1, self.max_len, self.max_keys

    def _options(self) -> dict[str, Any]:
        if self.window is None:
            return {"scale": self.scale}
        return {"scale": self.scale, "window_size_left": self.window, "window_size_right": 0}


def fits_flash(q_Thd: Tensor, v_Tgd: Tensor) -> bool:
    """Return whether `TorchFlash` can compute attention of these tensors."""
    is_half = q_Thd.dtype in (torch.bfloat16, torch.float16)
    return q_Thd.is_cuda and is_half and q_Thd.shape[-1] == v_Tgd.shape[-1] <= 256


def flash_attention(
    q_Thd: Tensor, k_Tgd: Tensor, v_Tgd: Tensor, sinks_h: Tensor | None, kernel: AttentionKernel
) -> Tensor:
    """Return attention with a sink per query head, or without, [T, h, d]."""
    if sinks_h is None:
        sinks_h = q_Thd.new_full(q_Thd.shape[1:2], -torch.inf)
    return _WithSinks.apply(q_Thd, k_Tgd, v_Tgd, sinks_h, kernel)  # type: ignore[return-value]


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernel: AttentionKernel
    ) -> Tensor:
        out, lse_hT, ctx.state = kernel.forward(q, k, v)
        total_hT = torch.logaddexp(lse_hT, sinks.float()[:, None])
        out = out * (lse_hT - total_hT).exp().T[..., None].to(out.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, total_hT)
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        q, k, v, sinks, out, total_hT = ctx.saved_tensors
        grad = grad.contiguous()
        grads = ctx.kernel.backward(grad, (q, k, v), out, total_hT, ctx.state)
        rows_hT = (grad.float() * out.float()).sum(-1).T
        share_hT = (sinks.float()[:, None] - total_hT).exp()
        return *grads, -(share_hT * rows_hT).sum(-1).to(sinks.dtype), None
