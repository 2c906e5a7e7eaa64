"""Lets the attention of a GPTModel see the keys of tokens that a sequence takes over from another.

    rotary angles   by the positions of the computed tokens, which may begin in mid-sequence
    q, k, v         of the computed tokens, each once
    k, v            gathered for each sequence: those that it takes over, then its own
    attention       the last query of a sequence sees its last key (causal, bottom right)

Gradients of gathered keys and values add up at the tokens that computed them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mcore_rl.device.attention import BOTTOM_RIGHT
from mcore_rl.train.packing import RankBatch, SharedRows


@dataclass
class SharedSeqParams(PackedSeqParams):
    """Packed sequences that see keys of others; megatron-core reads the lengths of the queries."""

    rows: SharedRows | None = None

    @staticmethod
    def from_rows(own: PackedSeqParams, rows: SharedRows) -> "SharedSeqParams":
        # The rotary embedding takes the longest sequence from these lengths.
        fields = {**vars(own), "max_seqlen_kv": rows.max_keys}
        return SharedSeqParams(**fields, rows=rows)

    def to_kernel_params(self) -> PackedSeqParams:
        """Return the lengths of queries and keys, as attention kernels take them."""
        assert self.rows is not None
        return PackedSeqParams(
            qkv_format=self.qkv_format,
            cu_seqlens_q=self.cu_seqlens_q,
            cu_seqlens_kv=self.rows.cu_keys_N1,
            max_seqlen_q=self.max_seqlen_q,
            max_seqlen_kv=self.rows.max_keys,
        )


class SharedAttention:
    """Hooks into the chunks of a model; text models with attention over plain keys and values."""

    def __init__(self, chunks: Sequence[GPTModel]) -> None:
        self._positions_T: Tensor | None = None
        for chunk in chunks:
            if hasattr(chunk, "rotary_pos_emb"):
                chunk.rotary_pos_emb.register_forward_hook(self._take_angles)
            for layer in chunk.decoder.layers:
                core: Any = layer.self_attention.core_attention
                core.register_forward_pre_hook(_with_shared_keys, with_kwargs=True)

    def enter(self, placed: RankBatch) -> None:
        """Name the micro-batch that a chunk runs on next, as it is on the device."""
        self._positions_T = None if placed.shared is None else placed.positions_T

    def _take_angles(self, module: torch.nn.Module, args: Any, angles: Any) -> Any:
        """Return the rotary angles [T, 1, 1, d] of the computed tokens."""
        if self._positions_T is None:
            return angles
        if isinstance(angles, tuple):  # yarn: with a factor
            return angles[0][self._positions_T], *angles[1:]
        return angles[self._positions_T]


def _with_shared_keys(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    params = kwargs["packed_seq_params"]
    if not isinstance(params, SharedSeqParams):
        return None
    assert params.rows is not None
    query, key, value, *others = args
    keys_K = params.rows.keys_K
    seen = key.index_select(0, keys_K), value.index_select(0, keys_K)
    changed = {"packed_seq_params": params.to_kernel_params(), "attn_mask_type": BOTTOM_RIGHT}
    return (query, *seen, *others), {**kwargs, **changed}
