"""Block FP8: values and scales by the published formula, whatever the layouts; cut blocks are refused."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from mcore_rl.slices.box import Box, Shard
from mcore_rl.slices.hf.fp8 import is_converted
from mcore_rl.slices.hf.quantize import quantise_into
from mcore_rl.slices.layouts.listed import ListedLayout
from mcore_rl.slices.plan.cost import predict
from mcore_rl.slices.plan.coverage import contiguous_strides
from mcore_rl.slices.plan.local import plan_recvs, plan_sends
from mcore_rl.slices.plan.shared_region import SplitGranularity
from mcore_rl.slices.plan.shares import RegularHosts
from mcore_rl.stream.buckets import plan_buckets
from mcore_rl.stream.placed_bucket import PlacedBucket, holdings
from tests.support.fp8_oracle import dequantise, per_block_cast_to_fp8

NAME, SCALES = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight_scale_inv"
NORM = "model.norm.weight"


def quantise(weights_NK: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = weights_NK.shape
    values_NK = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales_nk = torch.empty(-(-rows // 128), -(-columns // 128))
    quantise_into(weights_NK, values_NK, scales_nk)
    return values_NK, scales_nk


def equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, which torch.equal does not say of FP8."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(128, 128), (384, 256), (1, 1), (300, 129), (576, 200)])
def test_blocks_are_quantised_by_the_published_formula(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = (
        torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
    ).to(dtype)
    before = weights.clone()
    values, scales = quantise(weights)
    assert equal(weights, before)
    wanted_values, wanted_scales = per_block_cast_to_fp8(weights)
    assert equal(values, wanted_values)
    assert equal(scales, wanted_scales)
    error = (dequantise(values, scales) - weights.float()).abs()
    step = 2.0**-9 * dequantise(torch.ones_like(values), scales)
    assert (error <= weights.float().abs() * 2.0**-4 * 1.001 + step / 2).all()


def test_transformers_quantises_alike() -> None:
    weights = torch.randn(512, 384, generator=torch.Generator().manual_seed(1))

    quantizer = SimpleNamespace(
        quantization_config=FineGrainedFP8Config(weight_block_size=(128, 128))
    )
    matrices: Any = {NAME: weights}
    theirs = Fp8Quantize(quantizer).convert(matrices)
    values, scales = quantise(weights)
    assert (scales / theirs[SCALES] - 1).abs().max() < 1e-6
    differ = values.float() != theirs[NAME].float()
    assert differ.float().mean() < 1e-3
    assert (values.float() - theirs[NAME].float()).abs().max() <= values.float().abs().max() / 8


def test_blocks_of_zeros_small_and_broken_values() -> None:
    weights = torch.zeros(128, 512)
    weights[:, 128:256] = 1e-9
    weights[0, 256], weights[1, 256] = float("nan"), 1.0
    weights[0, 384], weights[1, 384] = float("inf"), 1.0
    values, scales = quantise(weights)
    small = dequantise(values, scales)[:, :256]
    assert (small - weights[:, :256]).abs().max() <= 1e-9
    assert dequantise(values, scales)[:, 256:384].isnan().all()
    assert dequantise(values, scales)[0, 384].isnan()


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, int], max_ranks: int) -> list[Box]:
    """A box for each rank: whole blocks of rows, columns or all; each perhaps on several ranks."""
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
    """A rank that holds `box` in runs of rows, in any order, as Megatron holds the groups of linear_qkv."""
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


@settings(max_examples=60, deadline=None)
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
    grain = data.draw(
        st.builds(
            SplitGranularity, min_bytes=st.sampled_from([1, 1 << 16]), rows=st.sampled_from([1, 48])
        )
    )
    bucket_bytes = data.draw(st.sampled_from([1000, 40_000, 1 << 20]))

    sends = [plan_sends(rank, source, target, hosts, grain) for rank in range(len(sources))]
    flows = {(rank, flow.peer): flow for rank, planned in enumerate(sends) for flow in planned}
    recvs = {
        (flow.peer, rank): flow
        for rank in range(len(targets))
        for flow in plan_recvs(rank, source, target, hosts, grain)
    }
    assert {pair: flow.digest for pair, flow in flows.items()} == {
        p: f.digest for p, f in recvs.items()
    }
    wanted_bytes = sum(
        t.numel() * t.element_size() for _, tensors in targets for t in tensors.values()
    )
    assert sum(flow.num_bytes for flow in flows.values()) == wanted_bytes
    traffic = predict(source, target, hosts, grain)
    assert traffic.trainer.network_out == [
        sum(flow.num_bytes for flow in planned) for planned in sends
    ]

    buckets = plan_buckets(
        {pair: f.slices for pair, f in flows.items()}, len(targets), bucket_bytes
    )
    assert sum(bucket.num_bytes for bucket in buckets) == wanted_bytes
    for bucket in buckets:
        words = torch.zeros(bucket.num_words, dtype=torch.int64)
        held, tensors = sources[bucket.source_rank]
        PlacedBucket(bucket, words, holdings(bucket, by_name(held)), tensors).pack(1)
        held, tensors = targets[bucket.target_rank]
        placed = PlacedBucket(bucket, words, holdings(bucket, by_name(held)), tensors)
        placed.verify(1)
        placed.place()

    values, scales = per_block_cast_to_fp8(weights)
    for box, (shards, tensors) in zip(wanted_boxes, targets, strict=True):
        inside = tuple(map(slice, box.start, box.stop))
        blocks = tuple(map(slice, shards[1].box.start, shards[1].box.stop))
        assert equal(tensors["weight"], values[inside])
        assert equal(tensors["scale"], scales[blocks])
        assert tensors["norm"].tolist() == [1.0] * 7


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


def test_projections_are_quantised_whatever_a_family_calls_them():
    layer = "model.layers.0."
    converted = (
        "self_attn.q_proj",
        "mlp.experts.3.up_proj",
        "block_sparse_moe.experts.3.w1",
        "mlp.shared_expert.down_proj",
    )
    kept = ("mlp.gate", "block_sparse_moe.gate", "mlp.shared_expert_gate", "self_attn.q_norm")
    assert all(is_converted(f"{layer}{name}.weight") for name in converted)
    assert not any(is_converted(f"{layer}{name}.weight") for name in kept)
    assert not is_converted(layer + "self_attn.q_proj.bias")
