"""A chunk's run reads and records the experts of its own tokens and layers."""

import torch

from mcore_rl.train.packing import make_rank_batch
from mcore_rl.train.router import ChunkRun, RoutingRecord, layers_of
from mcore_rl.types import TrainBatch
from tests.support.chunks import chunk_of


def test_a_chunk_names_its_layers() -> None:
    assert layers_of(chunk_of(5, 3)) == slice(4, 7)


def test_recorded_experts_of_two_chunks_lie_at_their_tokens_and_layers() -> None:
    ids_T = torch.arange(4)
    batch = make_rank_batch(TrainBatch(ids_T, ids_T > 0, (4,)), 0, 1, 1)
    record, rows = RoutingRecord(), slice(2, 4)
    for first in (0, 2):
        given_tlK = torch.arange(8, dtype=torch.int16).view(2, 2, 2)
        taken_tlK = torch.zeros(2, 2, 2, dtype=torch.int16)
        run = ChunkRun(batch, record, slice(first, first + 2), rows, given_tlK, taken_tlK)
        for layer_number in (first + 1, first + 2):
            given_TK = run.get_given(layer_number)
            assert given_TK is not None
            assert given_TK.tolist() == given_tlK[:, layer_number - 1 - first].tolist()
            run.take(layer_number, given_TK)
        run.keep_taken()
    experts_TLK = record.own_experts((4, 4, 2))
    assert not experts_TLK[:2].any()
    assert torch.equal(experts_TLK[2:, :2], given_tlK + 1)
    assert torch.equal(experts_TLK[2:, 2:], given_tlK + 1)


def test_a_run_that_records_nothing_leaves_no_experts() -> None:
    ids_T = torch.arange(2)
    batch = make_rank_batch(TrainBatch(ids_T, ids_T > 0, (2,)), 0, 1, 1)
    run = ChunkRun(batch, RoutingRecord(), slice(0, 1), slice(0, 2), None, None)
    assert run.get_given(1) is None
    run.take(1, torch.zeros(2, 2, dtype=torch.int64))
    run.keep_taken()
    assert run.record.parts == []
