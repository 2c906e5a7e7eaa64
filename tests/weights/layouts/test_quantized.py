"""FP8 engines: every value and scale arrives once, whatever the layouts; cut blocks are refused."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mcore_rl.weight_sync.buckets import Bucket, plan_buckets
from mcore_rl.weight_sync.placed_bucket import PlacedBucket, find_holdings
from mcore_rl.weights.box import Box, Shard, contiguous_strides
from mcore_rl.weights.hf.fp8 import FP8
from mcore_rl.weights.layouts.layout import PlacedPiece, Placement, Ranks
from mcore_rl.weights.layouts.listed import ListedLayout, QuantizedLayout, join_rows
from mcore_rl.weights.plan.cost import predict
from mcore_rl.weights.plan.local import plan_recvs, plan_sends
from mcore_rl.weights.plan.shared_region import SplitGranularity
from mcore_rl.weights.plan.shares import RegularHosts
from tests.support.fp8_oracle import per_block_cast_to_fp8

NAME = "model.layers.0.mlp.up_proj.weight"
SCALES = "model.layers.0.mlp.up_proj.weight_scale_inv"
NORM = "model.norm.weight"

Rank = tuple[list[Shard], dict[str, Tensor]]
"""The shards of a rank and the tensors that they lie in."""


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are equal, which torch.equal does not check for FP8."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, int], max_ranks: int) -> list[Box]:
    """A box for each rank, of whole blocks of rows or columns; several ranks may hold the same."""
    axis = draw(st.sampled_from([0, 1]))
    edges = [*range(0, shape[axis], 128), shape[axis]]
    inner = draw(st.lists(st.sampled_from(edges), max_size=2, unique=True))
    boxes = []
    for first, last in pairwise(sorted({0, shape[axis], *inner})):
        start, stop = [0, 0], list(shape)
        start[axis], stop[axis] = first, last
        boxes.append(Box(NAME, tuple(start), tuple(stop)))
    replicas = draw(st.integers(1, max_ranks // len(boxes)))
    return draw(st.permutations(boxes * replicas))


@st.composite
def trainer_rank(
    draw: st.DrawFn, box: Box, weights_NK: Tensor
) -> tuple[list[Shard], dict[str, Tensor]]:
    """A rank that holds `box` in runs of rows in any order, as Megatron does in linear_qkv."""
    rows = range(box.start[0] + 1, box.stop[0])
    inner = draw(st.lists(st.sampled_from(rows), max_size=3, unique=True)) if rows else []
    runs = draw(st.permutations(list(pairwise(sorted({box.start[0], box.stop[0], *inner})))))
    columns = slice(box.start[1], box.stop[1])
    width, offset, shards = box.shape[1], 0, []
    for first, last in runs:
        piece = Box(NAME, (first, box.start[1]), (last, box.stop[1]))
        shards.append(
            Shard(piece, "fused", offset, (width, 1), str(weights_NK.dtype).removeprefix("torch."))
        )
        offset += piece.numel
    tensors = {"fused": torch.cat([weights_NK[first:last, columns] for first, last in runs])}
    return [*shards, Shard(Box(NORM, (0,), (7,)), "norm", 0, (1,), "float32")], tensors | {
        "norm": torch.ones(7)
    }


def engine_rank(box: Box) -> tuple[list[Shard], dict[str, Tensor]]:
    start = tuple(a // 128 for a in box.start)
    scales = Box(SCALES, start, tuple(-(-b // 128) for b in box.stop))
    norm = Box(NORM, (0,), (7,))
    tensors = {
        "weight": torch.full(box.shape, float("nan")).to(torch.float8_e4m3fn),
        "scale": torch.full(scales.shape, float("nan")),
        "norm": torch.full((7,), float("nan"), dtype=torch.bfloat16),
    }
    boxes = (
        ("weight", box, "float8_e4m3fn"),
        ("scale", scales, "float32"),
        ("norm", norm, "bfloat16"),
    )
    return [
        Shard(b, name, 0, contiguous_strides(b.shape), dtype) for name, b, dtype in boxes
    ], tensors


def by_name(shards: list[Shard]) -> dict[str, list[Shard]]:
    found: dict[str, list[Shard]] = defaultdict(list)
    for shard in shards:
        found[shard.box.name].append(shard)
    return found


def carry(bucket: Bucket, source: Rank, target: Rank) -> None:
    """Pack a bucket on its source rank and unpack it on its target rank."""
    words = torch.zeros(bucket.num_words, dtype=torch.int64)
    held, tensors = source
    PlacedBucket(bucket, words, find_holdings(bucket, by_name(held)), tensors).pack(1)
    held, tensors = target
    placed = PlacedBucket(bucket, words, find_holdings(bucket, by_name(held)), tensors)
    placed.place(1)


def check_targets(weights: Tensor, boxes: list[Box], targets: list[Rank]) -> None:
    """Every target has the values and scales that a quantization of the whole matrix gives it."""
    values, scales = per_block_cast_to_fp8(weights)
    for box, (shards, tensors) in zip(boxes, targets, strict=True):
        inside = tuple(map(slice, box.start, box.stop))
        blocks = tuple(map(slice, shards[1].box.start, shards[1].box.stop))
        assert equal(tensors["weight"], values[inside])
        assert equal(tensors["scale"], scales[blocks])
        assert tensors["norm"].tolist() == [1.0] * 7


@settings(max_examples=60)
@given(data=st.data(), rows=st.integers(1, 700), columns=st.integers(1, 520))
def test_every_value_and_scale_is_sent_once_and_is_that_of_the_whole_matrix(
    data: st.DataObject, rows: int, columns: int
) -> None:
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    weights = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)
    sources = [
        data.draw(trainer_rank(box, weights))
        for box in data.draw(cuts((rows, columns), max_ranks=6))
    ]
    wanted_boxes = data.draw(cuts((rows, columns), max_ranks=4))
    targets = [engine_rank(box) for box in wanted_boxes]
    source, target = ListedLayout([s for s, _ in sources]), ListedLayout([t for t, _ in targets])
    hosts = RegularHosts(len(sources), len(targets), 1)
    granularity = data.draw(
        st.builds(
            SplitGranularity, min_bytes=st.sampled_from([1, 1 << 16]), rows=st.sampled_from([1, 48])
        )
    )
    bucket_bytes = data.draw(st.sampled_from([1000, 40_000, 1 << 20]))

    sends = [plan_sends(rank, source, target, hosts, granularity) for rank in range(len(sources))]
    flows = {(rank, flow.peer): flow for rank, planned in enumerate(sends) for flow in planned}
    recvs = {
        (flow.peer, rank): flow
        for rank in range(len(targets))
        for flow in plan_recvs(rank, source, target, hosts, granularity)
    }
    assert {pair: flow.digest for pair, flow in flows.items()} == {
        p: f.digest for p, f in recvs.items()
    }
    wanted_bytes = sum(
        t.numel() * t.element_size() for _, tensors in targets for t in tensors.values()
    )
    assert sum(flow.num_bytes for flow in flows.values()) == wanted_bytes
    traffic = predict(source, target, hosts, granularity)
    assert traffic.trainer.network_out == [
        sum(flow.num_bytes for flow in planned) for planned in sends
    ]

    slices = {pair: flow.slices for pair, flow in flows.items()}
    buckets = plan_buckets(slices, len(targets), bucket_bytes)
    assert sum(bucket.num_bytes for bucket in buckets) == wanted_bytes
    for bucket in buckets:
        carry(bucket, sources[bucket.source_rank], targets[bucket.target_rank])
    check_targets(weights, wanted_boxes, targets)


def plan(
    source_boxes: list[Box], target_boxes: list[Box], scale_dtype: str | None = "float32"
) -> None:
    held = [[Shard(box, "w", 0, (box.shape[1], 1), "bfloat16")] for box in source_boxes]
    wanted = []
    for values, scales, _ in (engine_rank(box)[0] for box in target_boxes):
        wanted.append([values, *([replace(scales, dtype=scale_dtype)] if scale_dtype else [])])
    plan_sends(0, ListedLayout(held), ListedLayout(wanted), RegularHosts(1, 1, 1))


WHOLE = [Box(NAME, (0, 0), (384, 256))]
HALVES = [Box(NAME, (0, 0), (192, 256)), Box(NAME, (192, 0), (384, 256))]


def test_a_cut_through_blocks_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError,
        match=r"source rank 0 holds '.*up_proj.weight' \(0, 0\) to \(192, 256\) of \(384, 256\)",
    ):
        plan(HALVES, WHOLE)
    with pytest.raises(
        ValueError, match=r"target rank 0 holds '.*up_proj.weight' \(0, 0\) to \(192, 256\)"
    ):
        plan(WHOLE, HALVES)


@pytest.mark.parametrize("scale_dtype", [None, "int32"])
def test_fp8_without_plain_scales_of_blocks_is_refused_by_name(scale_dtype: str | None) -> None:
    with pytest.raises(ValueError, match=r"not a float32 scale for each of its 128 x 128 blocks"):
        plan(WHOLE, WHOLE, scale_dtype)


def test_a_quantized_layout_has_values_and_scales_of_projections_and_keeps_the_rest() -> None:
    matrix = Shard(Box(NAME, (128, 0), (300, 256)), "w", 0, (256, 1), "bfloat16")
    norm = Shard(Box(NORM, (0,), (7,)), "norm", 0, (1,), "bfloat16")
    layout = QuantizedLayout(ListedLayout([[norm], [matrix]]))
    assert layout.num_ranks == 2
    assert list(layout.names(0)) == [NORM]
    assert list(layout.names(1)) == [NAME, SCALES]
    assert list(layout.all_names()) == [NORM, NAME, SCALES]
    (values,) = layout.placement(NAME).pieces
    assert (values.start, values.stop, values.dtype) == ((128, 0), (300, 256), FP8)
    (scales,) = layout.placement(SCALES).pieces
    assert (scales.start, scales.stop, scales.dtype) == ((1, 0), (3, 2), "float32")
    assert list(scales.ranks) == [1]
    (kept,) = layout.placement(NORM).pieces
    assert kept.dtype == "bfloat16"


def test_rows_of_the_same_ranks_are_joined_where_they_touch() -> None:
    def piece(first: int, last: int, rank: int) -> PlacedPiece:
        return PlacedPiece((first, 0), (last, 4), Ranks.from_iterable([rank]), "bfloat16")

    placement = Placement((piece(2, 4, 0), piece(0, 2, 0), piece(4, 6, 1), piece(8, 9, 1)))
    rows = [(p.start[0], p.stop[0], *p.ranks) for p in join_rows(placement).pieces]
    assert rows == [(0, 4, 0), (4, 6, 1), (8, 9, 1)]
