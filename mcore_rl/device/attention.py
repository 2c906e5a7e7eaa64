"""Causal attention over packed sequences, by torch or by a flash kernel, with or without sinks.

The result equals that of each sequence by itself. Torch's SDPA is called once for each bucket of
sequences of similar length (`attend_packed`):

    packed          a a a b b b b c            lens_N = (3, 4, 1)
    bucket 1   a a a .   bucket 2   c          "." repeats a's last token; causality hides it
               b b b b

A sink is a logit that joins each query's softmax without a value (arXiv:2309.17453), so it only
scales the output. Kernels without sinks, such as Transformer Engine 2.11's for packed sequences,
can therefore be used (`flash_attention`). With l the logarithm of a query's sum of exponentials,
s the sink and O the output without it:

    l' = log(exp(l) + exp(s))       O' = O * exp(l - l')

The kernel's backward pass gets O' and l' in place of O and l. It computes probabilities as
exp(logit - l') and their gradient as P * (dP - rowsum(dO' * O')), which is the gradient of the
softmax with a sink. The sink's own gradient is -exp(s - l') * rowsum(dO' * O').

Axes: T tokens of all sequences end to end, h query heads, g key heads, d head dimension, N
sequences, L tokens of the longest sequence in a bucket.
"""

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_PADDING = 1.5
"""Largest ratio of padded to real tokens in a bucket; more padding costs more than another call."""


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
    def from_params(params: Any, scale: float, window: int | None) -> "TorchFlash":
        """Return the kernel for the lengths in megatron-core's PackedSeqParams."""
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


class MaskType(Enum):
    """A mask type of Transformer Engine that megatron-core's AttnMaskType lacks."""

    padding_causal_bottom_right = "padding_causal_bottom_right"


BOTTOM_RIGHT = MaskType.padding_causal_bottom_right
"""Causal attention of packed sequences with more keys than queries: the last sees the last."""


@dataclass(frozen=True)
class AttentionSpec:
    """How causal attention is computed.

    scale     factor on the products of queries and keys
    window    number of earlier tokens that a token sees; None means all
    sinks_h   a logit per query head that joins the softmax without a value (arXiv:2309.17453)
    """

    scale: float
    window: int | None = None
    sinks_h: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        return self.window is None and self.sinks_h is None


def attend_packed(
    q_Thd: Tensor, k_Thd: Tensor, v_Thd: Tensor, lens_N: tuple[int, ...], spec: AttentionSpec
) -> Tensor:
    """Return causal attention within each sequence, [T, h * d].

    Fewer key heads than query heads means grouped-query attention. Sequences of similar length
    share a call, padded after their last token. Causality hides the padding from real tokens, so
    the result equals that of one sequence at a time.
    """
    if len(lens_N) == 1:
        return _causal(q_Thd[None], k_Thd[None], v_Thd[None], spec)[0]
    outs: list[Tensor] = []
    rows: list[Tensor] = []
    for index_NL, tokens in _buckets(lens_N, q_Thd.device):
        out_NLd = _causal(q_Thd[index_NL], k_Thd[index_NL], v_Thd[index_NL], spec)
        outs.append(out_NLd.flatten(0, 1).index_select(0, tokens))
        rows.append(index_NL.flatten().index_select(0, tokens))
    if len(outs) == 1:
        return outs[0]
    return torch.cat(outs).index_select(0, torch.argsort(torch.cat(rows)))


def attend_bottom_right(
    q_Thd: Tensor,
    k_Khd: Tensor,
    v_Khd: Tensor,
    lens_N: tuple[int, ...],
    key_lens_N: tuple[int, ...],
    spec: AttentionSpec,
) -> Tensor:
    """Return the attention of sequences whose last `lens_N` of `key_lens_N` tokens are queries.

    The result is [T, h * d].
    """
    parts = zip(q_Thd.split(lens_N), k_Khd.split(key_lens_N), v_Khd.split(key_lens_N), strict=True)
    return torch.cat([_attend_last_queries(q, k, v, spec) for q, k, v in parts])


def _attend_last_queries(
    q_Lhd: Tensor, k_Khd: Tensor, v_Khd: Tensor, spec: AttentionSpec
) -> Tensor:
    """Return the attention of a sequence's last L tokens to all K, [L, h * d]."""
    num_queries, num_keys = len(q_Lhd), len(k_Khd)
    if num_queries == num_keys:
        return _causal(q_Lhd[None], k_Khd[None], v_Khd[None], spec)[0]
    position_K = torch.arange(num_keys, device=q_Lhd.device)
    mask_LK = _sees(position_K[num_keys - num_queries :], position_K, spec)
    q, k, v = (x.transpose(0, 1)[None] for x in (q_Lhd, k_Khd, v_Khd))
    return _attend_masked(q, k, v, mask_LK, spec)[0].transpose(0, 1).flatten(1)


def _causal(q_NLhd: Tensor, k_NLhd: Tensor, v_NLhd: Tensor, spec: AttentionSpec) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_NLhd, k_NLhd, v_NLhd))
    if spec.is_plain:
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale)
    else:
        position_L = torch.arange(q.shape[2], device=q.device)
        out = _attend_masked(q, k, v, _sees(position_L, position_L, spec), spec)
    return out.transpose(1, 2).flatten(2)


def _sees(q_position: Tensor, k_position: Tensor, spec: AttentionSpec) -> Tensor:
    """Return bool [queries, keys], True where the query may attend to the key."""
    distance = q_position[:, None] - k_position
    seen = distance >= 0
    return seen if spec.window is None else seen & (distance <= spec.window)


def _attend_masked(
    q_NhLd: Tensor, k_NhKd: Tensor, v_NhKd: Tensor, mask_LK: Tensor, spec: AttentionSpec
) -> Tensor:
    """Return attention where `mask_LK` is True, [N, h, L, d]."""
    if spec.sinks_h is None:
        options = {"scale": spec.scale, "enable_gqa": q_NhLd.shape[1] != k_NhKd.shape[1]}
        return F.scaled_dot_product_attention(q_NhLd, k_NhKd, v_NhKd, attn_mask=mask_LK, **options)
    groups = q_NhLd.shape[1] // k_NhKd.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k_NhKd, v_NhKd))
    return attend_with_sinks(q_NhLd, k, v, mask_LK, spec.scale, spec.sinks_h[:, None])


def attend_with_sinks(
    q_NhLd: Tensor, k_NhKd: Tensor, v_NhKd: Tensor, mask: Tensor, scale: float, sinks: Tensor
) -> Tensor:
    """Return attention with sinks, [N, h, L, d].

    mask    bool, broadcast to [N, h, L, K]
    sinks   logit of each query's sink, broadcast to [N, h, L]
    """
    logits = (q_NhLd @ k_NhKd.transpose(-1, -2)).float() * scale
    logits = logits.masked_fill(~mask, float("-inf"))
    sinks_NhL1 = sinks.float().expand(logits.shape[:-1])[..., None]
    return torch.cat([logits, sinks_NhL1], -1).softmax(-1)[..., :-1].to(v_NhKd.dtype) @ v_NhKd


@lru_cache(maxsize=64)
def _buckets(lens_N: tuple[int, ...], device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return (packed_index_NL, flat positions of its real tokens) per bucket, on `device`.

    packed_index_NL maps each padded position to a token of the packed sequences. The flat positions
    are in packed order.
    """
    starts = torch.tensor((0, *lens_N)).cumsum(0)
    buckets = []
    for sequences in _split_by_len(lens_N):
        lens = torch.tensor([lens_N[i] for i in sequences])
        position_L = torch.arange(int(lens.max()))
        real_NL = position_L < lens[:, None]
        index_NL = starts[list(sequences), None] + torch.minimum(position_L, lens[:, None] - 1)
        buckets.append((index_NL.to(device), real_NL.flatten().nonzero()[:, 0].to(device)))
    return buckets


def _split_by_len(lens_N: tuple[int, ...]) -> list[list[int]]:
    """Return sequence indices in buckets whose padding stays within MAX_PADDING.

    A single bucket keeps the packed order; several are filled from the longest sequence down.
    """
    if max(lens_N) * len(lens_N) <= MAX_PADDING * sum(lens_N):
        return [list(range(len(lens_N)))]
    buckets: list[list[int]] = []
    for i in sorted(range(len(lens_N)), key=lambda i: -lens_N[i]):
        if buckets:
            total = sum(lens_N[j] for j in buckets[-1]) + lens_N[i]
            if lens_N[buckets[-1][0]] * (len(buckets[-1]) + 1) <= MAX_PADDING * total:
                buckets[-1].append(i)
                continue
        buckets.append([i])
    return buckets


def zigzag_positions(lens_N: tuple[int, ...], cp_rank: int, cp_size: int) -> tuple[Tensor, Tensor]:
    """Return (sequence, position in it) of context-parallel rank `cp_rank`'s tokens, [T / cp_size].

    Each sequence is cut into 2 * cp_size chunks; rank r holds chunks r and 2 * cp_size - 1 - r, as
    in Transformer Engine. Both ends of a sequence on one rank give every rank the same causal
    work:

        cp_size = 2:   | rank 0 | rank 1 | rank 1 | rank 0 |
    """
    sequence: list[Tensor] = []
    position: list[Tensor] = []
    for i, num_tokens in enumerate(lens_N):
        chunk_len = num_tokens // (2 * cp_size)
        chunks = torch.arange(num_tokens).view(2 * cp_size, chunk_len)
        position.append(chunks[[cp_rank, 2 * cp_size - 1 - cp_rank]].flatten())
        sequence.append(torch.full((2 * chunk_len,), i))
    return torch.cat(sequence), torch.cat(position)


def attend_context_parallel(
    q_Thd: Tensor,
    k_Thd: Tensor,
    v_Thd: Tensor,
    lens_N: tuple[int, ...],
    spec: AttentionSpec,
    rank: int,
    size: int,
) -> Tensor:
    """Return the attention of this rank's queries to all keys, [T / size, h * d].

    `k_Thd` and `v_Thd` are gathered from all ranks, in rank order.
    """
    q_sequence, q_position = zigzag_positions(lens_N, rank, size)
    parts = [zigzag_positions(lens_N, r, size) for r in range(size)]
    k_sequence, k_position = (torch.cat(x) for x in zip(*parts, strict=True))
    mask = (q_sequence[:, None] == k_sequence) & _sees(q_position, k_position, spec)
    mask = mask.to(q_Thd.device)
    q, k, v = (x.transpose(0, 1)[None] for x in (q_Thd, k_Thd, v_Thd))
    return _attend_masked(q, k, v, mask, spec)[0].transpose(0, 1).flatten(1)
