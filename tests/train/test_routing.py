"""Decisions of routers in a pass are recorded per micro-batch.

tests/scenarios/train/test_router_replay.py replays experts on real ranks.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from mcore_rl.train.packing import RankBatch, make_rank_batch
from mcore_rl.train.routing import Routing, RoutingRecord
from mcore_rl.types import TrainBatch
from tests.support.chunks import chunk_of
from tests.support.distributed import run_alone


def tiny_config(**changes: Any) -> TransformerConfig:
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    return TransformerConfig(**sizes, num_moe_experts=4, moe_router_topk=2, **changes)


def rank_batch(experts_TLK: Tensor | None) -> RankBatch:
    """Return three tokens whose experts are named."""
    mask_T = torch.ones(3, dtype=torch.bool)
    batch = TrainBatch(torch.arange(3), mask_T, (3,), routed_experts_TLK=experts_TLK)
    return make_rank_batch(batch, 0, 1, 1)


def record_a_pass() -> tuple[RoutingRecord, Tensor]:
    """Send all tokens to experts 0 and 1 in both layers; the routers would send them to 1 and 2."""
    named = [[[0, 1], [1, 0]], [[2, 3], [0, 1]], [[-1, -1], [-1, -1]]]
    batch = rank_batch(torch.tensor(named, dtype=torch.int16))
    chunk = chunk_of(1, 2)
    routing = Routing([chunk], tiny_config())
    routing.begin([batch], forward_only=False, record=True)
    routing.enter(batch, batch, chunk)
    own_TK = torch.tensor([[1, 2]] * 3)
    taken_TK = torch.tensor([[0, 1]] * 3)
    map_TE = torch.tensor([[True, True, False, False]] * 3)
    for layer in (1, 2):
        call = routing.start_call(layer, 3)
        assert call.given_TK is not None and not call.recomputes
        assert call.given_TK.tolist() == [experts[layer - 1] for experts in named]
        routing.end_call(call, own_TK, taken_TK, map_TE)
    (record,) = routing.take([batch])
    load_LE, _ = routing.load.reduce([])
    return record, load_LE


def test_flips_replacements_and_experts_are_recorded() -> None:
    record, load_LE = run_alone(record_a_pass)
    assert record.flips_T.tolist() == [0, 1, 0]  # the last token has no named experts
    assert record.replaced_T.tolist() == [2, 2, 2]
    assert record.experts_TLK.tolist() == [[[1, 2], [1, 2]]] * 3
    assert load_LE.tolist() == [[3, 3, 0, 0]] * 2


def recompute_two_batches() -> list[tuple[int, bool]]:
    """Return (index of the batch, whether it is a recomputation) of each run of a router."""
    batches = [rank_batch(None), rank_batch(None)]
    config = tiny_config(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    )
    routing = Routing([], config)
    routing.begin(batches, forward_only=False)
    calls, chunk = [], chunk_of(1, 1)
    with torch.no_grad():
        for batch in batches:
            routing.enter(batch, batch, chunk)
            calls.append(routing.start_call(1, 3))
    calls += [routing.start_call(1, 3) for _ in batches]
    routing.take(batches)
    return [(0 if call.run.batch is batches[0] else 1, call.recomputes) for call in calls]


def test_recomputation_meets_the_batches_in_the_order_of_their_forward_passes() -> None:
    calls = run_alone(recompute_two_batches)
    assert calls == [(0, False), (1, False), (0, True), (1, True)]


def a_chunk_gets_its_layers() -> list[list[list[int]]]:
    """Return the experts that two chunks, of layers 1 and 2 and of layers 3 and 4, replay."""
    experts_TLK = torch.arange(3 * 4 * 2, dtype=torch.int16).view(3, 4, 2) % 4
    batch = rank_batch(experts_TLK)
    config = replace(tiny_config(), num_layers=4)
    chunks = [chunk_of(1, 2), chunk_of(3, 2)]
    routing = Routing(chunks, config)
    routing.begin([batch], forward_only=True, replay=True, record=True)
    given = []
    map_TE = torch.ones(3, 4, dtype=torch.bool)
    for first, chunk in ((1, chunks[0]), (3, chunks[1])):
        routing.enter(batch, batch, chunk)
        for layer in (first, first + 1):
            call = routing.start_call(layer, 3)
            assert call.given_TK is not None and call.run.given_tlK is not None
            assert call.run.given_tlK.shape == (3, 2, 2)
            given.append(call.given_TK.tolist())
            routing.end_call(call, call.given_TK, call.given_TK, map_TE)
    (record,) = routing.take([batch])
    assert record.experts_TLK is not None
    assert torch.equal(record.experts_TLK, experts_TLK + 1)
    assert given == experts_TLK.transpose(0, 1).tolist()
    return given


def test_a_chunk_gets_the_experts_of_its_layers_only() -> None:
    assert len(run_alone(a_chunk_gets_its_layers)) == 4


def test_experts_of_a_model_of_another_shape_are_refused() -> None:
    routing = Routing([], tiny_config())
    batch = rank_batch(torch.zeros(3, 5, 2, dtype=torch.int16))
    with pytest.raises(ValueError, match=r"of 5 layers and 2 experts .* the model has 2 and 2"):
        routing.begin([batch], forward_only=True)
