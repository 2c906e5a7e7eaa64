"""Plans that each rank makes alone fit together: every element arrives once."""

import dataclasses
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.weights.box import Box, Shard, contiguous_strides
from mcore_rl.weights.layouts.layout import Placement
from mcore_rl.weights.layouts.listed import ListedLayout
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from mcore_rl.weights.models import hf_tensor_shapes
from mcore_rl.weights.plan.local import plan_recvs, plan_sends
from mcore_rl.weights.plan.shared_region import SplitGranularity
from mcore_rl.weights.plan.shares import ListedHosts, RegularHosts
from tests.support.layout_strategies import (
    GRANULARITIES,
    megatron_layout,
    megatron_sizes,
    models,
    sglang_layout,
    sglang_sizes,
    topologies,
)
from tests.support.megatron_layout import model_config
from tests.support.plan_execution import check, execute, numbered

FINE = SplitGranularity(min_bytes=1)


@given(st.data())
@settings(max_examples=4 * settings().max_examples)
def test_any_megatron_layout_reaches_any_engines_exactly_once(data: st.DataObject) -> None:
    config = data.draw(models())
    source = megatron_layout(config, data.draw(megatron_sizes(config)))
    target = sglang_layout(config, data.draw(sglang_sizes()))
    topology = data.draw(topologies(source.num_ranks, target.num_ranks))
    weights = numbered(hf_tensor_shapes(config))
    engines = execute(source, target, weights, topology, data.draw(GRANULARITIES))
    check(target, weights, engines)


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes (start, stop) of a random grid over a tensor."""
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    cells = product(*(list(pairwise(c)) for c in cuts))
    return [(tuple(a for a, _ in cell), tuple(b for _, b in cell)) for cell in cells]


def shard(name: str, start: tuple[int, ...], stop: tuple[int, ...]) -> Shard:
    box = Box(name, start, stop)
    return Shard(box, f"local.{name}", 0, contiguous_strides(box.shape), "float32")


@st.composite
def listed_layouts(draw: st.DrawFn, shapes: dict[str, tuple[int, ...]], full: bool) -> ListedLayout:
    """Shards of ranks that each cut the tensors their own way; `full`: they hold every element."""
    ranks: list[list[Shard]] = [[] for _ in range(draw(st.integers(1, 4)))]
    for name, shape in shapes.items():
        for rank, held in enumerate(ranks):
            cells = draw(grids(shape))
            chosen = (
                cells if full and rank == 0 else draw(st.lists(st.sampled_from(cells), unique=True))
            )
            held += [shard(name, *cell) for cell in chosen]
    return ListedLayout(ranks)


@given(st.data())
@settings(max_examples=2 * settings().max_examples)
def test_ranks_that_cut_each_in_its_own_way(data: st.DataObject) -> None:
    shapes: dict[str, tuple[int, ...]] = {"a": (6, 4), "b": (5,), "c": (3, 2, 4), "d": ()}
    source = data.draw(listed_layouts(shapes, full=True))
    target = data.draw(listed_layouts(shapes, full=False))
    topology = data.draw(topologies(source.num_ranks, target.num_ranks))
    weights = numbered(shapes)
    engines = execute(source, target, weights, topology, data.draw(GRANULARITIES))
    check(target, weights, engines)


def replicated(num_ranks: int, shape: tuple[int, int] = (64, 64)) -> ListedLayout:
    return ListedLayout([[shard("w", (0, 0), shape)] for _ in range(num_ranks)])


def test_holders_of_the_same_share_what_the_wanters_get() -> None:
    source, target = replicated(3), replicated(2)
    hosts = RegularHosts(1, 2, 3)
    sent = [
        sum(flow.num_bytes for flow in plan_sends(r, source, target, hosts, FINE)) for r in range(3)
    ]
    copy = 64 * 64 * 4
    assert max(sent) - min(sent) <= 64 * 4
    for rank in range(2):
        assert sum(flow.num_bytes for flow in plan_recvs(rank, source, target, hosts, FINE)) == copy


def test_holders_on_the_same_host_send_all() -> None:
    source, target = replicated(4), replicated(4)
    hosts = RegularHosts(2, 2, 1)
    for rank, peers in enumerate([{2, 3}, {2, 3}]):
        assert {flow.peer for flow in plan_recvs(rank, source, target, hosts, FINE)} <= peers
    for rank in (2, 3):
        assert {flow.peer for flow in plan_recvs(rank, source, target, hosts, FINE)} <= {0, 1, 2, 3}
    far = {flow.peer for rank in (0, 1) for flow in plan_sends(rank, source, target, hosts, FINE)}
    assert far <= {2, 3}


def test_hosts_of_unequal_size_are_served() -> None:
    source, target = replicated(3), replicated(6)
    hosts = ListedHosts((0, 0, 1), (2, 2, 2, 3, 4, 1))
    weights = numbered({"w": (64, 64)})
    check(target, weights, execute(source, target, weights, hosts, FINE))


def test_cuts_respect_the_granularity() -> None:
    source, target = replicated(3, (640, 8)), replicated(5, (640, 8))
    for granularity, multiple in (
        (SplitGranularity(1, 128), 128),
        (SplitGranularity(1 << 20), 640),
        (SplitGranularity(1, 1), 1),
    ):
        for rank in range(5):
            for flow in plan_recvs(rank, source, target, RegularHosts(1, 1, 9), granularity):
                assert all(piece.box.start[0] % multiple == 0 for piece in flow.slices)


def test_what_no_trainer_rank_holds_is_named() -> None:
    source = ListedLayout([[shard("w", (0, 0), (3, 4))]])
    target = ListedLayout([[], [shard("w", (0, 0), (4, 4))]])
    with pytest.raises(
        ValueError, match=r"target rank 1 needs Box\(name='w'.*no source rank holds 4 el"
    ):
        plan_recvs(1, source, target, RegularHosts(1, 1, 1))


def corrupted(layout: Any, change: Any) -> Any:
    """`layout` with `change` applied to the pieces of its first tensor that has several."""
    placement = layout.placement

    def wrong(name: str) -> Placement:
        pieces = placement(name).pieces
        return (
            Placement(change(pieces))
            if name == "model.layers.0.self_attn.q_proj.weight"
            else placement(name)
        )

    layout.placement = wrong
    return layout


@pytest.mark.parametrize(
    "change",
    [
        lambda pieces: (dataclasses.replace(pieces[0], ranks=pieces[1].ranks), *pieces[1:]),
        lambda pieces: (
            dataclasses.replace(pieces[0], stop=(pieces[0].stop[0] - 1, 8)),
            *pieces[1:],
        ),
        lambda pieces: (*pieces, dataclasses.replace(pieces[0], ranks=pieces[1].ranks)),
        lambda pieces: pieces[1:],
    ],
    ids=["wrong rank", "a row short", "twice", "left out"],
)
@pytest.mark.parametrize("side", ["source", "target"])
def test_a_corrupted_table_is_noticed(change: Any, side: str) -> None:
    config = model_config(mlp_only_layers=[])
    weights = numbered(hf_tensor_shapes(config))
    truth, wrong = (sglang_layout(config, SGLangSizes(tp=2, ep=2)) for _ in range(2))
    wrong = corrupted(wrong, change)
    source, target = (wrong, truth) if side == "source" else (truth, wrong)
    with pytest.raises((AssertionError, ValueError)):
        check(
            truth,
            weights,
            execute(source, target, weights, RegularHosts(2, 2, 1), FINE, held=truth),
        )
    check(truth, weights, execute(truth, truth, weights, RegularHosts(2, 2, 1), FINE))
