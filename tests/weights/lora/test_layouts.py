"""Layouts of factors are those that ranks derive from what they hold of the weights."""

from collections.abc import Iterable

import pytest

from mcore_rl.weights.box import Box, Shard, contiguous_strides
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.low_precision import Quantization
from mcore_rl.weights.layouts.layout import Layout, check_rank, list_boxes
from mcore_rl.weights.layouts.listed import RecordedLayouts
from mcore_rl.weights.layouts.megatron import MegatronSizes
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from mcore_rl.weights.lora.layouts import AdapterLayouts
from mcore_rl.weights.lora.places import (
    Content,
    list_parts,
    make_stamp_shard,
    make_whole_factors,
)
from mcore_rl.weights.plan.local import plan_recvs, plan_sends
from mcore_rl.weights.plan.shares import RegularHosts

RANK = 4
CONFIG = {
    **ModelFacts.read("recipes/model/qwen3_30b_a3b").config,
    "num_hidden_layers": 2,
    "num_experts": 8,
}
TRAINERS = [
    MegatronSizes(151936, tp=2, pp=2, ep=2, dp=2),
    MegatronSizes(151936, tp=2, ep=2, etp=2, dp=2),
]
ENGINES = [SGLangSizes(tp=4, ep=2), SGLangSizes(tp=8, ep=1)]


def hold(layout: Layout, rank: int) -> Iterable[Shard]:
    for box, dtype in list_boxes(layout, rank):
        yield Shard(box, box.name, 0, contiguous_strides(box.shape), dtype)


@pytest.mark.parametrize("engines", ENGINES, ids=["ep", "tp"])
@pytest.mark.parametrize("trainer", TRAINERS, ids=["pp", "etp"])
@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_ranks_find_what_is_recorded(
    trainer: MegatronSizes, engines: SGLangSizes, quantization: Quantization
) -> None:
    recorded = RecordedLayouts(CONFIG, "bfloat16", trainer, engines, quantization)
    kinds: tuple[Content, Content] = ("base", "factors")
    base, factors = (
        AdapterLayouts.decode(AdapterLayouts(recorded.encode(), kind, RANK, (), True).encode())
        for kind in kinds
    )
    matrices = {name: shape for name, (shape, _) in base.source().hf_tensors().items()}
    assert len(matrices) == 2 * (4 + 8 * 3)
    for rank in range(recorded.target().num_ranks):
        parts = list_parts(hold(recorded.target(), rank), matrices, RANK, "bfloat16")
        check_rank(base.target(), rank, [part.base for part in parts])
        own = [shard for part in parts for shard in (part.first, part.second)]
        check_rank(factors.target(), rank, [*own, make_stamp_shard("stamp")])
    for rank in range(recorded.source().num_ranks):
        shards = [shard for shard in hold(recorded.source(), rank) if shard.box.name in matrices]
        check_rank(base.source(), rank, shards)
        own = [make_stamp_shard("stamp")]
        for name in {shard.box.name for shard in shards}:
            own += make_whole_factors(name, matrices[name], RANK, ("a", "b"), "bfloat16")
        check_rank(factors.source(), rank, own)


def test_both_ends_plan_the_same_factors() -> None:
    recorded = RecordedLayouts(CONFIG, "bfloat16", TRAINERS[0], ENGINES[0])
    factors = AdapterLayouts(recorded.encode(), "factors", RANK, ("q_proj", "down_proj"), True)
    source, target = factors.source(), factors.target()
    hosts = RegularHosts(8, 8, 1)
    sent = {
        (rank, flow.peer): flow.digest
        for rank in range(source.num_ranks)
        for flow in plan_sends(rank, source, target, hosts)
    }
    received = {
        (flow.peer, rank): flow
        for rank in range(target.num_ranks)
        for flow in plan_recvs(rank, source, target, hosts)
    }
    assert {pair: flow.digest for pair, flow in received.items()} == sent
    boxes = {piece.box for flow in received.values() for piece in flow.slices}
    down = "model.layers.0.mlp.experts.3.down_proj.weight"
    assert {Box(f"{down}.A", (0, 0), (RANK, 384)), Box(f"{down}.A", (0, 384), (RANK, 768))} <= boxes
    assert not any("up_proj" in box.name for box in boxes)
