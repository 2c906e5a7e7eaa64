"""The indexer of sparse attention: weights of its heads in float32, and what trains it.

    hidden states -> linear_weights_proj -> weight of each head, float32     scores = sum over heads
    q_a latent    -> linear_wq_b         -> queries of each head             of weight * relu(q k)
    hidden states -> linear_wk, k_norm   -> one key

A score only decides which keys attention reads, so no gradient of the policy's loss reaches the
indexer. It stays as it was loaded, or learns from a loss of its own (loss.py). Its gradient then is
clipped by itself, so that the policy's update is the same with and without it.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexer, DSAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from mcore_rl.train.guarded_optimizer import APART
from mcore_rl.train.sparse.attention import SparseAttention


class _InFloat32:
    """Marks the classes that `with_float32_output` makes."""


@cache
def with_float32_output(linear: type) -> type:
    """Return a subclass of a linear layer's class that computes in float32.

    megatron-core 0.19.2 weighs the heads in the model's dtype; transformers and engines do in
    float32. A class made here is returned unchanged, since layers share their spec.
    """
    if issubclass(linear, _InFloat32):
        return linear

    class Float32Linear(_InFloat32, linear):
        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            return F.linear(x.float(), self.weight.float()), None

    return Float32Linear


def adapt_sparse_attention(attention: ModuleSpec) -> None:
    """Let a layer's attention take given keys, and its indexer weigh heads in float32.

    A layer without an indexer stays as it is. Layers share their spec.
    """
    core: Any = getattr(attention.submodules, "core_attention", None)
    if getattr(core, "module", None) is DSAttention:
        _adapt_core(core)


def _adapt_core(core: ModuleSpec) -> None:
    core.module = SparseAttention
    parts: Any = core.submodules.indexer.submodules  # type: ignore[union-attr]
    parts.linear_weights_proj = with_float32_output(parts.linear_weights_proj)


def train_indexers(chunks: Sequence[torch.nn.Module], *, are_trained: bool) -> None:
    """Leave the indexers out of the gradient's norm, or stop training them.

    Call it before DDP and the optimizer are made.
    """
    for parameter in _list_parameters(chunks):
        if are_trained:
            parameter.grad_norm_group = APART  # type: ignore[attr-defined]
        else:
            parameter.requires_grad_(False)


def _list_parameters(chunks: Sequence[torch.nn.Module]) -> Iterator[torch.nn.Parameter]:
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, DSAIndexer):
                yield from module.parameters()
