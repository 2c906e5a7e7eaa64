"""Compiled attention over packed sequences is torch's, forward and backward."""

import pytest
import torch
from torch import Tensor

from mcore_rl.cpu.kernels.attention import causal_attention
from mcore_rl.device.attention import AttentionSpec, attend_bottom_right, attend_packed

WAYS = (("compiled", torch.float32), ("torch", torch.float64))
"""The exact result is that in float64: two sums in float32 may each be off, to either side."""


@pytest.mark.parametrize("lens_N", [(1,), (5, 64, 1, 65), (200, 31)], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 32), (6, 2, 20)])
def test_values_and_gradients_are_those_of_torch(
    lens_N: tuple[int, ...], heads: int, kv_heads: int, dim: int
) -> None:
    torch.manual_seed(0)
    groups, num_tokens = heads // kv_heads, sum(lens_N)
    # As in megatron-core, k and v are slices of a product that has the queries, too.
    qkv = torch.randn(num_tokens, kv_heads, (groups + 2) * dim)
    scale, dout, results = 0.3, torch.randn(num_tokens, heads * dim), []
    for way, dtype in WAYS:
        leaf = qkv.to(dtype, copy=True).requires_grad_()
        q, k, v = leaf.split([groups * dim, dim, dim], -1)
        q = q.reshape(num_tokens, heads, dim)
        out = (
            causal_attention(q, k, v, lens_N, scale)
            if way == "compiled"
            else attend_packed(q, k, v, lens_N, AttentionSpec(scale))
        )
        results.append((out, *torch.autograd.grad(out, [leaf], dout.to(dtype))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=2e-6)


def test_sequences_may_have_more_keys_than_queries() -> None:
    torch.manual_seed(0)
    lens_N, key_lens_N = (3, 70, 5), (3, 100, 9)
    q, k, v = (torch.randn(n, 2, 16) for n in (sum(lens_N), sum(key_lens_N), sum(key_lens_N)))
    dout, results = torch.randn(sum(lens_N), 32), []
    for way, dtype in WAYS:
        leaves = q_, k_, v_ = tuple(x.to(dtype, copy=True).requires_grad_() for x in (q, k, v))
        out = (
            causal_attention(q_, k_, v_, lens_N, 0.3, key_lens_N)
            if way == "compiled"
            else attend_bottom_right(q_, k_, v_, lens_N, key_lens_N, AttentionSpec(0.3))
        )
        results.append((out, *torch.autograd.grad(out, leaves, dout.to(dtype))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=2e-6)


def test_large_scores_do_not_overflow() -> None:
    q = torch.full((3, 1, 4), 40.0)
    v = torch.arange(12.0).view(3, 1, 4)
    out: Tensor = causal_attention(q, q, v, (3,), 1.0)
    expected = torch.stack([v[: i + 1, 0].mean(0) for i in range(3)])
    torch.testing.assert_close(out, expected)
