"""Patches that put compiled code where megatron-core 0.19.2 has operations of torch on a CPU.

On a GPU these places have fused kernels of Transformer Engine or of megatron-core. What compiled
code does not take (other precisions, context parallelism, machines without a compiler) goes to
megatron-core's own function, as before.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mcore_rl.cpu.kernels import usable
from mcore_rl.cpu.kernels.layers import rotary, swiglu
from mcore_rl.cpu.kernels.matmul import add_rows, linear, take_rows


def fuse_rotary() -> None:
    """Turn queries and keys of packed sequences in one pass."""
    from megatron.core.models.common.embeddings import rope_utils

    original = rope_utils._apply_rotary_pos_emb_thd

    def apply(
        t: Tensor,
        cu_seqlens: Tensor,
        freqs: Tensor,
        rotary_interleaved: bool = False,
        mla_rotary_interleaved: bool = False,
        mscale: float = 1.0,
        cp_group: Any = None,
    ) -> Tensor:
        is_plain = not (rotary_interleaved or mla_rotary_interleaved)
        if is_plain and cp_group is not None and cp_group.size() == 1 and usable(t):
            lens_N = tuple(cu_seqlens.diff().tolist())
            turned = rotary(t, freqs, lens_N, mscale, by_token=len(freqs) == sum(lens_N))
            if turned is not None:
                return turned
        return original(
            t, cu_seqlens, freqs, rotary_interleaved, mla_rotary_interleaved, mscale, cp_group
        )

    rope_utils._apply_rotary_pos_emb_thd = apply


def fuse_swiglu() -> None:
    """Compute SwiGLU of experts and dense layers in one pass, the router's weights included."""
    from megatron.core.transformer import mlp
    from megatron.core.transformer.moe import experts, shared_experts

    weighted, plain = experts.weighted_bias_swiglu_impl, mlp.bias_swiglu_impl

    def apply_weighted(x: Tensor, bias: Tensor | None, weights: Tensor, *args: Any) -> Tensor:
        if bias is None and usable(x, weights):
            return swiglu(x.flatten(0, -2), weights).unflatten(0, x.shape[:-1])
        return weighted(x, bias, weights, *args)

    def apply(x: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
        if bias is None and usable(x):
            return swiglu(x.flatten(0, -2), None).unflatten(0, x.shape[:-1])
        return plain(x, bias, *args)

    experts.weighted_bias_swiglu_impl = mlp.weighted_bias_swiglu_impl = apply_weighted
    mlp.bias_swiglu_impl = shared_experts.bias_swiglu_impl = apply


def fuse_permutation() -> None:
    """Send rows to experts and back without an index for each of their elements."""
    from megatron.core.transformer.moe import token_dispatcher

    permute, unpermute = token_dispatcher.permute, token_dispatcher.unpermute

    def permute_rows(
        tokens: Tensor,
        routing_map: Tensor,
        probs: Tensor | None = None,
        num_out_tokens: int | None = None,
        fused: bool = False,
        drop_and_pad: bool = False,
        **pads: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
        if fused or drop_and_pad or not usable(tokens):
            return permute(tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad, **pads)
        chosen_ET = routing_map.bool().T.contiguous()
        rows = chosen_ET.nonzero()[:, 1].contiguous()
        own_probs = None if probs is None else probs.T.contiguous().masked_select(chosen_ET)
        return take_rows(tokens, rows), own_probs, rows, None, pads.get("tokens_per_expert")

    def unpermute_rows(
        permuted_tokens: Tensor,
        sorted_indices: Tensor,
        restore_shape: torch.Size,
        probs: Tensor | None = None,
        routing_map: Tensor | None = None,
        fused: bool = False,
        drop_and_pad: bool = False,
        **pads: Any,
    ) -> Tensor:
        if probs is None and not (fused or drop_and_pad) and usable(permuted_tokens):
            return add_rows(permuted_tokens, sorted_indices, restore_shape[0])
        how = (probs, routing_map, fused, drop_and_pad)
        return unpermute(permuted_tokens, sorted_indices, restore_shape, *how, **pads)

    token_dispatcher.permute, token_dispatcher.unpermute = permute_rows, unpermute_rows
    token_dispatcher.sort_chunks_by_idxs = _leave_sorted(token_dispatcher.sort_chunks_by_idxs)


def _leave_sorted(sort_chunks: Callable[..., Any]) -> Callable[..., Any]:
    """Return megatron-core's sort of chunks, which leaves alone what is in order."""

    def sort_rows(
        input: Tensor,
        split_sizes: Tensor,
        sorted_idxs: Tensor,
        probs: Tensor | None = None,
        fused: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if sorted_idxs.tolist() == list(range(len(sorted_idxs))):
            return input, probs
        return sort_chunks(input, split_sizes, sorted_idxs, probs, fused)

    return sort_rows


def use_faster_library() -> None:
    """Multiply by the weights of linear layers with the faster of two BLAS libraries."""
    from megatron.core.tensor_parallel import layers

    original = layers.linear_with_grad_accumulation_and_async_allreduce

    @functools.wraps(original)
    def apply(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: list[Tensor] | None = None,
        **options: Any,
    ) -> Tensor:
        how = (gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, grad_output_buffer)
        if any(each not in (False, None) for each in how) or not usable(input, weight):
            return original(input, weight, bias, *how, **options)
        out = linear(input, weight)
        return out if bias is None else out + bias

    layers.linear_with_grad_accumulation_and_async_allreduce = apply


KERNEL_PATCHES = (fuse_rotary, fuse_swiglu, fuse_permutation, use_faster_library)
