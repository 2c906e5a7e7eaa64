"""Compiled code in megatron-core's place computes the same, and leaves the rest to it."""

import functools
from collections.abc import Iterator

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import mlp
from megatron.core.transformer.moe import experts, shared_experts, token_dispatcher

from mcore_rl.cpu.kernel_patches import (
    fuse_permutation,
    fuse_rotary,
    fuse_swiglu,
    use_faster_library,
)

PATCHED = (
    (rope_utils, "_apply_rotary_pos_emb_thd"),
    (experts, "weighted_bias_swiglu_impl"),
    (mlp, "weighted_bias_swiglu_impl"),
    (mlp, "bias_swiglu_impl"),
    (shared_experts, "bias_swiglu_impl"),
    (token_dispatcher, "permute"),
    (token_dispatcher, "unpermute"),
    (token_dispatcher, "sort_chunks_by_idxs"),
    (layers, "linear_with_grad_accumulation_and_async_allreduce"),
)


class Group:
    """A context-parallel group of `num_ranks`, of which this is the first."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks

    def size(self) -> int:
        return self.num_ranks

    def rank(self) -> int:
        return 0


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo the patches afterwards; megatron-core's own functions are not compiled meanwhile."""
    for module, name in PATCHED:
        monkeypatch.setattr(module, name, getattr(module, name))
    with torch.compiler.set_stance("force_eager"):
        yield


def test_rotary_embedding() -> None:
    original = rope_utils._apply_rotary_pos_emb_thd
    fuse_rotary()
    half = torch.rand(12, 1, 1, 4)
    freqs, cu_seqlens = torch.cat([half, half], -1), torch.tensor([0, 8, 12], dtype=torch.int32)
    x = torch.randn(12, 2, 8)
    ours = rope_utils._apply_rotary_pos_emb_thd(x, cu_seqlens, freqs, cp_group=Group(1))
    theirs = original(x, cu_seqlens, freqs, cp_group=Group(1))
    torch.testing.assert_close(ours, theirs)
    assert not torch.equal(ours, x)
    own = rope_utils._apply_rotary_pos_emb_thd(x[:6], cu_seqlens, freqs, cp_group=Group(2))
    assert torch.equal(own, original(x[:6], cu_seqlens, freqs, cp_group=Group(2)))
    bf16 = rope_utils._apply_rotary_pos_emb_thd(x.bfloat16(), cu_seqlens, freqs, cp_group=Group(1))
    assert torch.equal(bf16, original(x.bfloat16(), cu_seqlens, freqs, cp_group=Group(1)))


def test_swiglu() -> None:
    weighted, plain = experts.weighted_bias_swiglu_impl, mlp.bias_swiglu_impl
    fuse_swiglu()
    x, weights, bias = torch.randn(3, 2, 10), torch.rand(6, 1), torch.randn(10)
    flat = x.flatten(0, 1)
    torch.testing.assert_close(
        experts.weighted_bias_swiglu_impl(flat, None, weights, False),
        weighted(flat, None, weights, False),
    )
    for module in (mlp, shared_experts):
        ours = module.bias_swiglu_impl(x, None, False, False)
        torch.testing.assert_close(ours, plain(x, None, False, False))
        assert torch.equal(module.bias_swiglu_impl(x, bias), plain(x, bias))
    bf16 = x.bfloat16()
    assert torch.equal(mlp.bias_swiglu_impl(bf16, None), plain(bf16, None))


def test_permutation() -> None:
    permute, unpermute = token_dispatcher.permute, token_dispatcher.unpermute
    sort_chunks = token_dispatcher.sort_chunks_by_idxs
    fuse_permutation()
    torch.manual_seed(0)
    tokens, probs = torch.randn(6, 4), torch.rand(6, 3)
    chosen = torch.rand(6, 3) > 0.4
    num_out = int(chosen.sum())
    *ours, pad_offsets, counts = token_dispatcher.permute(tokens, chosen, probs, num_out)
    theirs = permute(tokens, chosen, probs, num_out)
    assert pad_offsets is counts is None and theirs[3:] == (None, None)
    for mine, other in zip(ours, theirs[:3], strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)
    rows, _, index = ours
    back = token_dispatcher.unpermute(rows, index, tokens.shape, routing_map=chosen)
    torch.testing.assert_close(back, unpermute(rows, index, tokens.shape))
    weighted = token_dispatcher.unpermute(rows, index, tokens.shape, probs, chosen)
    assert torch.equal(weighted, unpermute(rows, index, tokens.shape, probs, chosen))
    for order in ([0, 1, 2], [2, 0, 1]):
        sizes, order_E = torch.tensor([2, 3, 1]), torch.tensor(order)
        mine, own_probs = token_dispatcher.sort_chunks_by_idxs(tokens, sizes, order_E, probs[:, 0])
        theirs, their_probs = sort_chunks(tokens, sizes, order_E, probs[:, 0])
        assert torch.equal(mine, theirs) and torch.equal(own_probs, their_probs)


def test_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    original = layers.linear_with_grad_accumulation_and_async_allreduce
    passed = []

    @functools.wraps(original)
    def pass_on(*args: object, **kwargs: object) -> torch.Tensor:
        passed.append(args)
        return original(*args, **kwargs)

    name = "linear_with_grad_accumulation_and_async_allreduce"
    monkeypatch.setattr(layers, name, pass_on)
    use_faster_library()
    x, weight, bias = torch.randn(300, 1, 24), torch.randn(16, 24), torch.randn(16)
    options = {"gradient_accumulation_fusion": False, "sequence_parallel": False}
    for own_bias in (None, bias):
        results = []
        for function in (getattr(layers, name), original):
            leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
            out = function(*leaves, own_bias, allreduce_dgrad=False, **options)
            results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
    assert not passed
    half = [each.bfloat16() for each in (x, weight)]
    getattr(layers, name)(*half, None, allreduce_dgrad=False, **options)
    assert len(passed) == 1
