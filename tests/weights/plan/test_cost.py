"""Predicted bytes agree with the plans of all ranks, and with counts by hand."""

from dataclasses import asdict, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.weights.box import Box, Shard, contiguous_strides
from mcore_rl.weights.layouts.listed import ListedLayout
from mcore_rl.weights.plan.cost import Load, by_host, predict, predict_gather_broadcast
from mcore_rl.weights.plan.local import Flow, plan_recvs, plan_sends
from mcore_rl.weights.plan.shared_region import SplitGranularity
from mcore_rl.weights.plan.shares import RegularHosts, Topology
from tests.support.layout_strategies import (
    GRANULARITIES,
    megatron_layout,
    megatron_sizes,
    models,
    sglang_layout,
    sglang_sizes,
    topologies,
)


@given(st.data())
@settings(max_examples=60)
def test_the_prediction_is_the_sum_of_the_plans(data: st.DataObject) -> None:
    config = data.draw(models())
    source = megatron_layout(config, data.draw(megatron_sizes(config)))
    sizes = data.draw(sglang_sizes())
    target = sglang_layout(config, sizes)
    hosts = data.draw(topologies(source.num_ranks, target.num_ranks))
    granularity, relays = data.draw(GRANULARITIES), data.draw(st.booleans())
    one = sglang_layout(config, replace(sizes, engines=1)) if relays else target
    traffic = predict(source, target, hosts, granularity, one.num_ranks if relays else None)
    trainer, engines = Load.zero(source.num_ranks), Load.zero(target.num_ranks)
    for rank in range(source.num_ranks):
        for flow in plan_sends(rank, source, one, hosts, granularity):
            count_send(rank, flow, hosts, trainer, engines)
    for rank in range(one.num_ranks, target.num_ranks):
        before = rank - one.num_ranks
        got = sum(
            flow.num_bytes
            for flow in plan_recvs(before % one.num_ranks, source, one, hosts, granularity)
        )
        near = hosts.target_host(before) == hosts.target_host(rank)
        (engines.local_out if near else engines.network_out)[before] += got
        (engines.local_in if near else engines.network_in)[rank] += got
    assert asdict(traffic.trainer) == asdict(trainer)
    assert asdict(traffic.engines) == asdict(engines)
    assert traffic.lower_bound <= traffic.busiest_link


def count_send(rank: int, flow: Flow, hosts: Topology, trainer: Load, engines: Load) -> None:
    near = hosts.source_host(rank) == hosts.target_host(flow.peer)
    (trainer.local_out if near else trainer.network_out)[rank] += flow.num_bytes
    (engines.local_in if near else engines.network_in)[flow.peer] += flow.num_bytes


def layout(rows: list[tuple[int, int]]) -> ListedLayout:
    boxes = [Box("w", (start, 0), (stop, 4)) for start, stop in rows]
    return ListedLayout([[Shard(b, "w", 0, contiguous_strides(b.shape), "float32")] for b in boxes])


def test_even_layouts_reach_the_lower_bound() -> None:
    source = layout([(0, 8), (8, 16)] * 2)
    target = layout([(0, 4), (4, 8), (8, 12), (12, 16)] * 2)
    traffic = predict(
        source, target, RegularHosts(2, 2, 2), SplitGranularity(min_bytes=1), engine_ranks=4
    )
    assert traffic.trainer.network_out == [16 * 4 * 4 // 4] * 4
    assert traffic.engines.network_in == [4 * 4 * 4] * 8
    assert traffic.busiest_link == traffic.lower_bound == 64
    assert traffic.seconds(link_gbps=1e-9 * 8) == 64
    assert by_host([1, 2, 3, 4], lambda rank: rank // 2) == {0: 3, 1: 7}


def test_engine_ranks_beside_the_trainer_pass_on_over_links_of_their_own() -> None:
    """Engine rank 0 runs on the trainer's host and relays its half to the next engine."""
    source, target = layout([(0, 8)]), layout([(0, 4), (4, 8)] * 2)
    traffic = predict(
        source, target, RegularHosts(1, 1, 0), SplitGranularity(min_bytes=1), engine_ranks=2
    )
    assert traffic.trainer.local_out == traffic.trainer.network_out == [64]
    assert traffic.engines.network_out == [64, 64, 0, 0]
    assert traffic.busiest_link == traffic.lower_bound == 64


def test_gather_and_broadcast_by_hand() -> None:
    """Two trainer hosts hold half of the tensor each; two engine ranks run on a third host."""
    source, target = layout([(0, 8), (8, 16)]), layout([(0, 8), (8, 16)])
    rival = predict_gather_broadcast(source, target, RegularHosts(1, 2, 2), stage_ranks=2)
    assert rival.model_bytes == 256
    assert rival.gathered_in == [128, 128]
    assert rival.network_bytes == 2 * 128 + 256
    assert rival.seconds(link_gbps=8e-9) == 128 + 256
    one_host = predict_gather_broadcast(source, target, RegularHosts(2, 2, 1), stage_ranks=2)
    assert one_host.gathered_in == [0, 0]
