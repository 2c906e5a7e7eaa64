"""Sparse attention that reads given keys, or reports the keys that its indexer chose.

    packed_seq_params.keys   None          megatron-core's own attention
                             replays       reads the keys that the micro-batch names; its own
                                           indexer chooses for tokens without any, which are the
                                           last of each sequence and padding
                             otherwise     reads what its indexer chooses, and counts differences

megatron-core lets a layer take over the choice of an earlier one, through a dictionary that travels
with the lengths of the sequences. Given keys come the same way, and choices are read from there.
"""

from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.experimental_attention_variant import dsa_layout
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAttention,
    fused_qk_topk_naive,
)
from torch import Tensor

from mcore_rl.train.sparse.choices import ChunkKeys, IndexedSeqParams


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
        holder: dict[int, Tensor] = {}
        if keys.replays:
            holder[self.layer_number] = self._take_given(keys, given["x"], given["qr"], params)[
                None
            ]
        self.index_share = True
        self.skip_topk = keys.replays
        given["packed_seq_params"] = replace(params, _dsa_index_share_topk_holder=holder)
        out = super().forward(query, key, value, **given)
        self.index_share = self.skip_topk = False
        if not keys.replays and torch.is_grad_enabled():  # layers are recomputed with gradients
            keys.count(self.layer_number, holder[self.layer_number][0])
        return out

    @torch.no_grad()
    def _take_given(
        self, keys: ChunkKeys, x: Tensor, qr: Tensor, params: IndexedSeqParams
    ) -> Tensor:
        """Return the keys that each token reads, int64 [T, K]."""
        given_TK, without_U = keys.get_given(self.layer_number)
        query, key, weights = self.indexer.forward_before_topk(x, qr, params)
        position_T = torch.arange(len(given_TK), device=x.device)
        cp_group = self.pg_collection.cp
        if cp_group.size() > 1:
            position_T, order = (
                dsa_layout.build_packed_allgather_cp_query_positions_and_key_reorder(
                    params.cu_seqlens_q,
                    params.cu_seqlens_kv,
                    cp_group.size(),
                    cp_group.rank(),
                    x.device,
                    local_output_size=len(given_TK),
                )
            )
            key = gather_from_sequence_parallel_region(key, group=cp_group)[order]
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
