"""Sparse attention to keys that are given, or that an indexer chooses; and this indexer.

    packed_seq_params.keys   None          megatron-core's own attention
                             replays       reads the keys that the micro-batch names; its own
                                           indexer chooses for tokens without any, which are the
                                           last of each sequence and padding
                             otherwise     reads what its indexer chooses
                             counts        counts where that differs from what is named
                             loss          trains the indexer on the keys that were read

megatron-core lets a layer take over the choice of an earlier one, through a dictionary that travels
with the lengths of the sequences. Given keys come the same way, and choices are read from there.
Where layers share an indexer, its choice waits for them in `packed_seq_params.taken`.

    hidden states -> linear_weights_proj -> weight of each head, float32     scores = sum over heads
    q_a latent    -> linear_wq_b         -> queries of each head             of weight * relu(q k)
    hidden states -> linear_wk, k_norm   -> one key

A score only decides which keys attention reads, so no gradient of the policy's loss reaches the
indexer. It stays as it was loaded, or learns from a loss of its own (loss.py). Its gradient then is
clipped by itself, so that the policy's update is the same with and without it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.experimental_attention_variant import dsa_layout
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexer,
    DSAIndexerLossAutoScaler,
    DSAttention,
    fused_qk_topk_naive,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from mcore_rl.train.guarded_optimizer import APART
from mcore_rl.train.sparse.choices import ChunkKeys, IndexedSeqParams
from mcore_rl.train.sparse.loss import Divergence, IndexerLoss, compute_target


class SparseAttention(DSAttention):
    """One layer's attention over packed sequences; see the module."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor | None = None, **given: Any
    ) -> Tensor:
        """Return what DSAttention.forward does, of the keys that the sequences were given."""
        params = given["packed_seq_params"]
        keys = params.keys if isinstance(params, IndexedSeqParams) else None
        if keys is None:
            return super().forward(query, key, value, **given)
        chosen_TK = self._find_chosen(keys, given["x"], given["qr"], params)
        out, chosen_TK = self._attend_to(chosen_TK, query, key, value, given)
        if self.index_share and self.indexer is not None:
            params.taken[self.layer_number] = chosen_TK
        if not torch.is_grad_enabled():  # layers are recomputed with gradients
            return out
        if keys.counts is not None and not keys.replays:
            keys.count(self.layer_number, keys.counts, chosen_TK)
        if keys.loss is None or self.indexer is None:
            return out
        index = self.indexer.forward_before_topk(given["x"].detach(), given["qr"].detach(), params)
        loss = self._compute_loss(keys.loss, query.detach(), key.detach(), index, chosen_TK, params)
        return DSAIndexerLossAutoScaler.apply(out, keys.loss.coef * loss)  # type: ignore[return-value]

    def _find_chosen(
        self, keys: ChunkKeys, x: Tensor, qr: Tensor, params: IndexedSeqParams
    ) -> Tensor | None:
        """Return the keys that are chosen before attention runs; None: its own indexer chooses."""
        if keys.replays:
            return self._take_given(keys, x, qr, params)
        return None if self.indexer is not None else params.taken[self.source_layer]

    def _attend_to(
        self,
        chosen_TK: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        given: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Return (what DSAttention.forward does, the keys that were read); None: as it chooses."""
        params = given["packed_seq_params"]
        native = self.index_share, self.skip_topk, self.source_layer
        holder = {} if chosen_TK is None else {self.layer_number: chosen_TK[None]}
        self.index_share, self.skip_topk = True, chosen_TK is not None
        self.source_layer = self.layer_number
        given = {**given, "packed_seq_params": replace(params, _dsa_index_share_topk_holder=holder)}
        out = super().forward(query, key, value, **given)
        self.index_share, self.skip_topk, self.source_layer = native
        return out, holder[self.layer_number][0]

    def _compute_loss(
        self,
        loss: IndexerLoss,
        query: Tensor,
        key: Tensor,
        index: tuple[Tensor, Tensor, Tensor],
        chosen_TK: Tensor,
        params: IndexedSeqParams,
    ) -> Tensor:
        """Return the sum of the indexer's loss over local tokens, and add it to the layer's sums.

        query, key   of attention, [T, 1, H, D] and [T, 1, 1, D]
        index        the indexer's queries [T, 1, H, d], keys [T, 1, d] and weights of heads
        """
        index_query, index_key, head_weights = index
        query, key = (dsa_layout.ensure_sbhd(x, "latents")[0] for x in (query, key))
        assert key.shape[2] == 1, f"attention has keys of {key.shape[2]} heads, not latents"
        num_tokens = len(chosen_TK)
        assert len(query) == len(index_query) == num_tokens, (query.shape, index_query.shape)
        if self.pg_collection.cp.size() > 1:
            _, order = self._order_packed(num_tokens, params, query.device)
            key, index_key = (self._gather_packed(x, order) for x in (key, index_key))
        target_TK = compute_target(
            query[:, 0], key[:, 0, 0], chosen_TK, self.softmax_scale, self.pg_collection.tp
        )
        total = Divergence.apply(
            *(index_query[:, 0], index_key[:, 0], head_weights[:, 0]),
            *(target_TK, chosen_TK, loss.weigh_tokens(num_tokens)),
        )
        loss.sums_L[self.layer_number - 1] += total.detach()
        return total

    def _order_packed(
        self, num_tokens: int, params: IndexedSeqParams, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return (positions of local tokens among the packed ones, order of gathered keys)."""
        group = self.pg_collection.cp
        return dsa_layout.build_packed_allgather_cp_query_positions_and_key_reorder(
            *(params.cu_seqlens_q, params.cu_seqlens_kv, group.size(), group.rank(), device),
            local_output_size=num_tokens,
        )

    def _gather_packed(self, key: Tensor, order: Tensor) -> Tensor:
        """Return the keys of all context-parallel ranks in packed order."""
        return gather_from_sequence_parallel_region(key, group=self.pg_collection.cp)[order]

    @torch.no_grad()
    def _take_given(
        self, keys: ChunkKeys, x: Tensor, qr: Tensor, params: IndexedSeqParams
    ) -> Tensor:
        """Return the keys that each token reads, int64 [T, K]."""
        given_TK, without_U = keys.get_given(self.layer_number)
        if self.indexer is None:
            given_TK[without_U] = params.taken[self.source_layer][without_U]
            return given_TK
        query, key, weights = self.indexer.forward_before_topk(x, qr, params)
        position_T = torch.arange(len(given_TK), device=x.device)
        if self.pg_collection.cp.size() > 1:
            position_T, order = self._order_packed(len(given_TK), params, x.device)
            key = self._gather_packed(key, order)
        position_U = position_T[without_U]
        cu_seqlens = params.cu_seqlens_q.long()
        sequence_U = torch.searchsorted(cu_seqlens[1:], position_U, right=True)
        _, own_1UK = fused_qk_topk_naive(
            query[without_U],
            key,
            weights[without_U],
            given_TK.shape[1],
            varlen_starts=cu_seqlens[sequence_U],
            varlen_ends=position_U + 1,
        )
        own_UK = own_1UK[0]
        given_TK[without_U, : own_UK.shape[1]] = own_UK
        return given_TK


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
