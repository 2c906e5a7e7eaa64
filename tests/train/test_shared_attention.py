"""Hooks give a model the positions and keys of shared beginnings, and only those."""

from types import SimpleNamespace
from typing import Any, cast

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mcore_rl.batches.shared_prefixes import Sharing
from mcore_rl.device.attention import BOTTOM_RIGHT
from mcore_rl.train.packing import RankBatch, lay_out_shared, make_rank_batch
from mcore_rl.train.shared_attention import SharedAttention, SharedSeqParams
from mcore_rl.types import TrainBatch


class Angles(torch.nn.Module):
    def forward(self, num: int) -> Tensor:
        return 10 * torch.arange(num)


class Core(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, **more: Any) -> Any:
        return q, k, v, more


def hooked() -> tuple[SharedAttention, Angles, Core]:
    core, angles = Core(), Angles()
    layer = SimpleNamespace(self_attention=SimpleNamespace(core_attention=core))
    chunk = SimpleNamespace(rotary_pos_emb=angles, decoder=SimpleNamespace(layers=[layer]))
    return SharedAttention([cast(Any, chunk)]), angles, core


def rank_batch(*, share: bool) -> RankBatch:
    ids = torch.tensor([7, 8, 9, 7, 6, 5, 7, 8, 9, 7, 4, 3])
    mask = torch.tensor([False] * 4 + [True] * 2).repeat(2)
    return make_rank_batch(TrainBatch(ids, mask, (6, 6)), 0, 1, 1, share=share)


def test_angles_are_those_of_the_computed_tokens() -> None:
    attention, angles, _ = hooked()
    attention.enter(rank_batch(share=True))
    assert angles(6).tolist() == [0, 10, 20, 30, 40, 50, 30, 40, 50]
    attention.enter(rank_batch(share=False))
    assert angles(6).tolist() == [0, 10, 20, 30, 40, 50]


def test_kernels_get_the_keys_that_a_sequence_takes_over() -> None:
    _, _, core = hooked()
    rows = lay_out_shared((6, 6), (6, 3), Sharing((-1, 0), (0, 3), (0, 1)))
    lens = torch.tensor([0, 6, 9], dtype=torch.int32)
    own = PackedSeqParams("thd", lens, lens, max_seqlen_q=6, max_seqlen_kv=6)
    query, key, value = (torch.arange(9) + 100 * n for n in range(3))
    q, k, v, more = core(
        query,
        key,
        value,
        None,
        attn_mask_type="",
        packed_seq_params=SharedSeqParams.from_rows(own, rows),
    )
    seen = [0, 1, 2, 3, 4, 5, 0, 1, 2, 6, 7, 8]
    assert q is query and (k - 100).tolist() == seen and (v - 200).tolist() == seen
    assert more["attn_mask_type"] is BOTTOM_RIGHT
    params = more["packed_seq_params"]
    assert type(params) is PackedSeqParams
    assert params.cu_seqlens_q.tolist() == [0, 6, 9] and params.cu_seqlens_kv.tolist() == [0, 6, 12]
    assert params.max_seqlen_kv == 6
    _, k, _, more = core(query, key, value, None, attn_mask_type="", packed_seq_params=own)
    assert k is key and more["packed_seq_params"] is own
