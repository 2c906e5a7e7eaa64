"""Inputs and reports of the pipeline schedule; tests/scenarios/train/test_layouts.py runs it."""

from types import SimpleNamespace
from typing import Any

import torch

from mcore_rl.train.packing import RankBatch, make_rank_batch
from mcore_rl.train.schedule import _make_packed_seq_params, _make_padding_mask, _report
from mcore_rl.types import TrainBatch


def rank_batch(lens_N: tuple[int, ...], tp_size: int) -> RankBatch:
    ids_T = torch.arange(sum(lens_N))
    batch = TrainBatch(ids_T, torch.ones_like(ids_T).bool(), lens_N)
    return make_rank_batch(batch, 0, 1, tp_size)


def model(sequence_parallel: bool = False, pre_process: bool = True) -> Any:
    config = SimpleNamespace(sequence_parallel=sequence_parallel)
    return SimpleNamespace(config=config, pre_process=pre_process)


def test_a_report_counts_real_tokens_only() -> None:
    batch = rank_batch((3, 2), tp_size=4)
    logits_1TV = torch.arange(8.0).view(1, 8, 1)
    loss, num_tokens, report = _report(
        lambda batch, logits_TV: (logits_TV.sum(), {"shape": tuple(logits_TV.shape)}),
        batch,
        logits_1TV,
    )
    assert loss.item() == 28 and report == {"shape": (8, 1)}
    assert num_tokens.item() == 5 and num_tokens.dtype == torch.int


def test_attention_gets_padded_lengths() -> None:
    params = _make_packed_seq_params(rank_batch((3, 2), tp_size=4), model())
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 3, 8]
    assert params.qkv_format == "thd" and params.max_seqlen_q == params.max_seqlen_kv == 5


def test_the_routers_mask_marks_padding() -> None:
    assert _make_padding_mask(rank_batch((4,), tp_size=1), model()) is None
    batch = rank_batch((3, 2), tp_size=4)
    for chunk in (model(), model(sequence_parallel=True), model(pre_process=False)):
        mask_1T = _make_padding_mask(batch, chunk)
        assert mask_1T is not None
        assert mask_1T.tolist() == [[False] * 5 + [True] * 3]
