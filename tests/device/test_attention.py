"""Packed attention equals one sequence at a time; context-parallel parts equal the whole."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl.device.attention import (
    AttentionSpec,
    _split_by_len,
    attend_bottom_right,
    attend_context_parallel,
    attend_packed,
    zigzag_positions,
)

SCALE = 0.3
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
FORMS = [
    AttentionSpec(SCALE),
    AttentionSpec(SCALE, window=3),
    AttentionSpec(SCALE, sinks_h=SINKS),
    AttentionSpec(SCALE, 2, SINKS),
]


def make_qkv(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(num_tokens, h, 8, generator=generator) for h in (4, 2, 2))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, lens_N: tuple[int, ...], form: AttentionSpec
) -> Tensor:
    """Return attention sequence by sequence; with a sink or a window, query by query."""
    outs = []
    for parts in zip(*(x.split(list(lens_N)) for x in (q, k, v)), strict=True):
        qs, ks, vs = (x.transpose(0, 1)[None] for x in parts)
        if form.sinks_h is None and form.window is None:
            out = F.scaled_dot_product_attention(
                qs, ks, vs, is_causal=True, scale=SCALE, enable_gqa=True
            )
            outs.append(out[0].transpose(0, 1).flatten(1))
        else:
            outs += [query_by_query(parts, at, form) for at in range(len(parts[0]))]
    return torch.cat(outs)


def query_by_query(parts: tuple[Tensor, ...], at: int, form: AttentionSpec) -> Tensor:
    q, k, v = parts
    first = 0 if form.window is None else max(0, at - form.window)
    heads = []
    for head in range(4):
        keys, values = (x[first : at + 1, head // 2] for x in (k, v))
        weights = (keys @ q[at, head] * form.scale).exp()
        sink = 0.0 if form.sinks_h is None else form.sinks_h[head].exp()
        heads.append(weights @ values / (weights.sum() + sink))
    return torch.cat(heads)[None]


@pytest.mark.parametrize("form", FORMS, ids=["plain", "window", "sinks", "both"])
@pytest.mark.parametrize("lens_N", [(7,), (5, 5, 4), (1, 40, 2, 39, 3), (64, 1, 1, 1, 20)])
def test_packed_attention(lens_N: tuple[int, ...], form: AttentionSpec) -> None:
    results = []
    attentions: list[Callable[..., Tensor]] = [one_by_one, attend_packed]
    for attend in attentions:
        qkv = make_qkv(sum(lens_N))
        out = attend(*qkv, lens_N, form)
        (out * torch.arange(out.numel()).view_as(out).cos()).sum().backward()
        results.append((out, *(x.grad for x in qkv)))
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", FORMS, ids=["plain", "window", "sinks", "both"])
def test_the_last_tokens_of_sequences_see_what_they_do_in_the_whole(form: AttentionSpec) -> None:
    lens_N, key_lens_N = (3, 5, 1), (7, 5, 6)
    ends = torch.tensor(key_lens_N).cumsum(0).tolist()
    own = torch.cat([torch.arange(e - n, e) for e, n in zip(ends, lens_N, strict=True)])
    results = []
    for is_whole in (True, False):
        q, k, v = make_qkv(sum(key_lens_N))
        if is_whole:
            out = one_by_one(q, k, v, key_lens_N, form)[own]
        else:
            out = attend_bottom_right(q[own], k, v, lens_N, key_lens_N, form)
        (out * torch.arange(out.numel()).view_as(out).cos()).sum().backward()
        results.append((out, *(x.grad for x in (q, k, v))))
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_every_sequence_is_in_one_bucket() -> None:
    lens_N = (1, 500, 2, 490, 3, 3, 77)
    buckets = _split_by_len(lens_N)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(lens_N)))
    assert 1 < len(buckets) < len(lens_N)


@pytest.mark.parametrize("form", FORMS, ids=["plain", "window", "sinks", "both"])
@pytest.mark.parametrize("cp_size", [2, 3])
def test_context_parallel_parts_make_the_whole(cp_size: int, form: AttentionSpec) -> None:
    lens_N = (2 * cp_size, 6 * cp_size, 4 * cp_size)
    starts = torch.tensor((0, *lens_N)).cumsum(0)
    q, k, v = make_qkv(sum(lens_N))
    rows = []
    for rank in range(cp_size):
        sequence, position = zigzag_positions(lens_N, rank, cp_size)
        rows.append(starts[sequence] + position)
    assert sorted(torch.cat(rows).tolist()) == list(range(sum(lens_N)))
    gathered = torch.cat(rows)
    wanted = one_by_one(q, k, v, lens_N, form)
    for rank in range(cp_size):
        out = attend_context_parallel(
            q[rows[rank]], k[gathered], v[gathered], lens_N, form, rank, cp_size
        )
        torch.testing.assert_close(out, wanted[rows[rank]], rtol=0, atol=1e-6)
