"""Plans on random boxes are executed and counted: every target element arrives once."""

import dataclasses
import random
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.weights.box import Box, Shard, contiguous_strides, subtract
from mcore_rl.weights.plan.whole import make_plan
from tests.support.reshard import reshard


def grid(
    shape: tuple[int, ...], rng: random.Random
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes (start, stop) of a random grid over a tensor."""
    cuts = [
        sorted({0, size, *rng.sample(range(size + 1), rng.randrange(min(3, size + 1)))})
        for size in shape
    ]
    cells = product(*(list(pairwise(c)) for c in cuts))
    return [(tuple(a for a, _ in cell), tuple(b for _, b in cell)) for cell in cells]


def local_tensor(
    rank: dict[str, torch.Tensor], box: Box, rng: random.Random, value: torch.Tensor
) -> Shard:
    """A shard of `value` in a new tensor, with axes in random order and a random offset."""
    name, offset = f"t{len(rank)}", rng.randrange(3)
    order = rng.sample(range(len(box.shape)), len(box.shape))
    packed = contiguous_strides(tuple(box.shape[axis] for axis in order))
    strides = tuple(packed[order.index(axis)] for axis in range(len(order)))
    rank[name] = torch.full((offset + box.numel,), -1)
    shard = Shard(box, name, offset, strides, "int64")
    shard.view(rank).copy_(value)
    return shard


@given(st.integers(1, 4), st.integers(1, 4), st.randoms(use_true_random=False))
@settings(max_examples=3 * settings().max_examples)
def test_every_target_element_is_written_once_with_its_value(num_sources, num_targets, rng):
    weights = {
        f"w{i}": torch.randint(1, 1 << 40, [rng.randint(1, 6) for _ in range(rng.randint(1, 3))])
        for i in range(3)
    }
    sources, targets, held, wanted = ([], [], [], [])
    for count, tensors, layout in ((num_sources, sources, held), (num_targets, targets, wanted)):
        tensors += [{} for _ in range(count)]
        layout += [[] for _ in range(count)]
    for name, weight in weights.items():
        for start, stop in grid(tuple(weight.shape), rng):
            box = Box(name, start, stop)
            value = weight[tuple(map(slice, start, stop))]
            for rank in rng.sample(range(num_sources), rng.randint(1, num_sources)):
                held[rank].append(local_tensor(sources[rank], box, rng, value))
        for rank in range(num_targets):
            for start, stop in grid(tuple(weight.shape), rng):
                box = Box(name, start, stop)
                wanted[rank].append(local_tensor(targets[rank], box, rng, torch.tensor(0)))
    plan = make_plan(held, wanted)
    counts = [{name: torch.zeros_like(t) for name, t in rank.items()} for rank in targets]
    for transfer in plan.transfers:
        transfer.target.view(counts[transfer.target_rank]).add_(1)
    reshard(plan, sources, targets)
    for rank, shards in enumerate(wanted):
        for shard in shards:
            box = tuple(map(slice, shard.box.start, shard.box.stop))
            assert torch.equal(shard.view(targets[rank]), weights[shard.box.name][box])
            assert shard.view(counts[rank]).eq(1).all()


def column(name: str, start: int, stop: int, dtype: str = "float32", tensor: str = "t") -> Shard:
    return Shard(Box(name, (start,), (stop,)), f"{tensor}.{name}", 0, (1,), dtype)


def test_equal_input_gives_an_equal_plan_and_order_within_a_rank_does_not_matter():
    sources = [[column(name, 0, 8) for name in "abc"] for _ in range(2)]
    targets = [[column(name, 0, 8) for name in "cab"], [column("b", 2, 4)]]
    plan = make_plan(sources, targets)
    assert plan == make_plan([shards[::-1] for shards in sources], [targets[0][::-1], targets[1]])
    moved = dataclasses.replace(targets[1][0], offset=1)
    assert make_plan(sources, [targets[0], [moved]]) != plan


def test_replicas_share_the_bytes():
    sources = [[column(f"w{i}", 0, (10 + i) * 1000) for i in range(16)] for _ in range(4)]
    plan = make_plan(sources, [[*sources[0]], [*sources[0]]])
    sent = [sum(transfer.num_bytes for transfer in plan.sends(rank)) for rank in range(4)]
    assert sum(sent) == 4 * 2 * sum(10 + i for i in range(16)) * 1000
    assert max(sent) <= sum(sent) / 4 * 1.01


def test_bytes_are_those_of_the_target_dtype_and_a_box_in_two_places_fills_both():
    wanted = [column("w", 0, 8, "bfloat16"), column("w", 0, 8, "bfloat16", tensor="tied")]
    plan = make_plan(
        [[column("w", 0, 8, "float32"), column("w", 0, 8, "float32", tensor="tied")]], [wanted]
    )
    assert [transfer.num_bytes for transfer in plan.transfers] == [16, 16]
    assert {transfer.target.tensor for transfer in plan.transfers} == {"t.w", "tied.w"}


def test_sends_and_recvs_of_a_pair_are_in_the_same_order():
    sources = [[column(name, 0, 8) for name in "abcd"] for _ in range(2)]
    targets = [[column(name, i, 8) for name in "dbca"] for i in range(2)]
    plan = make_plan(sources, targets)
    for source, target in product(range(2), range(2)):
        sent = [t for t in plan.sends(source) if t.target_rank == target]
        assert sent == [t for t in plan.recvs(target) if t.source_rank == source]
    assert plan.sends(7) == ()


@pytest.mark.parametrize("held", [[], [column("w", 0, 3)], [column("w", 0, 3), column("w", 4, 8)]])
def test_a_target_that_nobody_holds_is_named(held):
    with pytest.raises(
        ValueError, match=r"target rank 1 needs Box\(name='w'.*no source rank holds"
    ):
        make_plan([held], [[], [column("w", 0, 8, tensor="engine")]])


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 4), min_size=1, max_size=3))
def test_subtract_leaves_the_rest_once(axes):
    outer = [(min(a, b), max(a, b) + 1) for a, b, _, _ in axes]
    hole = [
        (min(max(c, lo), hi - 1), max(min(d + 1, hi), lo + 1))
        for (_, _, c, d), (lo, hi) in zip(axes, outer, strict=True)
    ]
    hole = [(min(a, b - 1), b) for a, b in hole]
    box, gap = (Box("w", tuple(a for a, _ in x), tuple(b for _, b in x)) for x in (outer, hole))
    count = torch.zeros([6] * len(axes), dtype=torch.int64)
    for part in [*subtract(box, gap), gap]:
        count[tuple(map(slice, part.start, part.stop))] += 1
    assert count[tuple(map(slice, box.start, box.stop))].eq(1).all()
    assert count.sum() == box.numel
