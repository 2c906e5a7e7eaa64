"""Buckets: bounded, in an order that cannot deadlock, exact, and fail closed when a byte changed."""

from collections import Counter, defaultdict
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mcore_rl.slices.box import Box, Shard
from mcore_rl.slices.layouts.listed import ListedLayout
from mcore_rl.slices.plan.local import plan_recvs, plan_sends
from mcore_rl.slices.plan.shared_region import Slice
from mcore_rl.slices.plan.shares import RegularHosts
from mcore_rl.stream.buckets import Bucket, plan_buckets, split_box
from mcore_rl.stream.placed_bucket import PlacedBucket, holdings
from mcore_rl.stream.routes.transport import TransferError
from mcore_rl.stream.verify import ROW_WORDS
from tests.support.sync_layouts import column_cut, make_tensors, row_cut

shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


@given(shape=shapes, max_numel=st.integers(1, 40))
def test_a_box_is_cut_into_bounded_parts_that_cover_it_once(
    shape: tuple[int, ...], max_numel: int
) -> None:
    box = Box("w", tuple(3 for _ in shape), tuple(3 + n for n in shape))
    parts = split_box(box, max_numel)
    elements = Counter(e for part in parts for e in product(*map(range, part.start, part.stop)))
    assert set(elements.values()) == {1}
    assert len(elements) == box.numel
    assert all(part.numel <= max_numel for part in parts)


Flows = dict[tuple[int, int], tuple[Slice, ...]]
HOSTS = RegularHosts(1, 1, 1)


def layouts_of(num_sources: int, num_targets: int) -> tuple[ListedLayout, ListedLayout]:
    hf = make_tensors()
    sources = [row_cut(hf, rank, num_sources, "float32")[0] for rank in range(num_sources)]
    targets = [column_cut(hf, rank, num_targets, "float32")[0] for rank in range(num_targets)]
    return ListedLayout(sources), ListedLayout(targets)


def sends_of(rank: int, source: ListedLayout, target: ListedLayout) -> Flows:
    flows = plan_sends(rank, source, target, HOSTS)
    return {(rank, flow.peer): tuple(flow.slices) for flow in flows}


def recvs_of(rank: int, source: ListedLayout, target: ListedLayout) -> Flows:
    flows = plan_recvs(rank, source, target, HOSTS)
    return {(flow.peer, rank): tuple(flow.slices) for flow in flows}


@pytest.mark.parametrize("bucket_bytes", [8, 100, 4096, 1 << 20])
@pytest.mark.parametrize(("num_sources", "num_targets"), [(1, 1), (2, 1), (1, 2), (3, 2), (4, 4)])
def test_every_element_once_and_no_bucket_too_large(
    num_sources: int, num_targets: int, bucket_bytes: int
) -> None:
    layouts = layouts_of(num_sources, num_targets)
    flows = {pair: f for rank in range(num_targets) for pair, f in recvs_of(rank, *layouts).items()}
    buckets = plan_buckets(flows, num_targets, bucket_bytes)
    assert sum(b.num_bytes for b in buckets) == sum(
        s.num_bytes for slices in flows.values() for s in slices
    )
    assert all(bucket.num_bytes <= bucket_bytes for bucket in buckets)
    for bucket in buckets:
        ends = [
            bucket.pieces[0].first_word,
            *(p.first_word + p.num_rows * ROW_WORDS for p in bucket.pieces),
        ]
        assert ends[:-1] == [piece.first_word for piece in bucket.pieces]
        assert 2 + len(bucket.pieces) <= ends[0] < 2 + len(bucket.pieces) + ROW_WORDS


@pytest.mark.parametrize("bucket_bytes", [64, 4096])
@pytest.mark.parametrize(("num_sources", "num_targets"), [(2, 3), (4, 4), (5, 2)])
def test_ranks_that_work_through_their_own_buckets_in_order_never_block_each_other(
    num_sources: int, num_targets: int, bucket_bytes: int
) -> None:
    layouts = layouts_of(num_sources, num_targets)
    cut = lambda flows: plan_buckets(flows, num_targets, bucket_bytes)  # noqa: E731
    sends = {rank: cut(sends_of(rank, *layouts)) for rank in range(num_sources)}
    recvs = {rank: cut(recvs_of(rank, *layouts)) for rank in range(num_targets)}
    while any(sends.values()) or any(recvs.values()):
        heads = {rank: queue[0] for rank, queue in sends.items() if queue}
        movable = [b for b in heads.values() if recvs[b.target_rank][:1] == [b]]
        assert movable, "every sender waits for a receiver that waits for another"
        for bucket in movable:
            sends[bucket.source_rank].pop(0)
            recvs[bucket.target_rank].pop(0)


def placed_in(
    bucket: Bucket, words_W: Tensor, shards: list[Shard], tensors: dict[str, Tensor]
) -> PlacedBucket:
    by_name: dict[str, list[Shard]] = defaultdict(list)
    for shard in shards:
        by_name[shard.box.name].append(shard)
    return PlacedBucket(bucket, words_W, holdings(bucket, by_name), tensors)


def packed(bucket: Bucket, shards: list[Shard], tensors: dict[str, Tensor]) -> Tensor:
    """The bucket's words as version 3."""
    words_W = torch.zeros(bucket.num_words, dtype=torch.int64)
    placed_in(bucket, words_W, shards, tensors).pack(3)
    return words_W


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bucket_bytes", [24, 1000, 1 << 20])
def test_packed_cast_and_unpacked_values_are_exact(dtype: str, bucket_bytes: int) -> None:
    hf = make_tensors()
    source_shards, sources = row_cut(hf, 0, 1, "float32")
    target_shards, targets = column_cut(hf, 0, 1, dtype)
    expected = {name: tensor.clone() for name, tensor in targets.items()}
    for tensor in targets.values():
        tensor.fill_(float("nan"))
    flows = sends_of(0, ListedLayout([source_shards]), ListedLayout([target_shards]))
    for bucket in plan_buckets(flows, 1, bucket_bytes):
        placed = placed_in(bucket, packed(bucket, source_shards, sources), target_shards, targets)
        placed.verify(3)
        placed.place()
    assert all(torch.equal(targets[name], expected[name]) for name in expected)


SHARD = Shard(Box("w", (0,), (6,)), "param", 0, (1,), "float32")


def one_bucket() -> tuple[Bucket, Tensor]:
    (bucket,) = plan_buckets({(0, 0): [Slice(SHARD.box, "float32")]}, 1, 1024)
    return bucket, packed(bucket, [SHARD], {"param": torch.arange(6, dtype=torch.float32)})


def received(bucket: Bucket, words_W: Tensor, tensors: dict[str, Tensor]) -> PlacedBucket:
    return placed_in(bucket, words_W, [SHARD], tensors)


def test_a_slice_may_lie_in_several_pieces_and_land_in_several_places() -> None:
    whole = Slice(Box("w", (0, 0), (4, 3)), "float32")
    (bucket,) = plan_buckets({(0, 0): [whole]}, 1, 1024)
    halves = [
        Shard(Box("w", (2 * i, 0), (2 * i + 2, 3)), "fused", 6 * (1 - i), (3, 1), "float32")
        for i in range(2)
    ]
    words_W = packed(bucket, halves, {"fused": torch.arange(12, dtype=torch.float32)})
    twice = [Shard(whole.box, name, 0, (3, 1), "float32") for name in ("embedding", "head")]
    tensors = {name: torch.zeros(12) for name in ("embedding", "head")}
    placed = placed_in(bucket, words_W, twice, tensors)
    placed.verify(3)
    placed.place()
    assert tensors["head"].tolist() == tensors["embedding"].tolist() == [*range(6, 12), *range(6)]
    with pytest.raises(AssertionError, match="only 6 elements"):
        placed_in(bucket, words_W, halves[:1], tensors)


def test_a_bucket_may_travel_in_memory_other_than_it_is_packed_and_verified_in() -> None:
    bucket, expected_W = one_bucket()
    message_W, desk_W = torch.full_like(expected_W, 7), torch.full_like(expected_W, 7)
    held = holdings(bucket, {"w": [SHARD]})
    values, received = torch.arange(6, dtype=torch.float32), torch.zeros(6)
    sent = PlacedBucket(bucket, desk_W, held, {"param": values}, message_W)
    sent.pack(3)
    assert sent.message_u8.data_ptr() == message_W.data_ptr()
    assert torch.equal(message_W.view(-1, ROW_WORDS)[1], expected_W.view(-1, ROW_WORDS)[1])
    desk_W.fill_(7)
    placed = PlacedBucket(bucket, desk_W, held, {"param": received}, message_W)
    placed.verify(3)
    placed.place()
    assert torch.equal(received, values)
    message_W[-1] ^= 1
    with pytest.raises(TransferError, match="has checksum"):
        placed.verify(3)


def test_a_changed_byte_is_refused_by_name() -> None:
    bucket, words_W = one_bucket()
    words_W.view(torch.uint8)[bucket.pieces[0].first_word * 8 + 5] ^= 1
    with pytest.raises(
        TransferError, match=r"w \(0,\) to \(6,\), bound for param, has checksum .* engine rank 0"
    ):
        received(bucket, words_W, {"param": torch.zeros(6)}).verify(3)


def test_a_bucket_of_another_version_is_refused() -> None:
    bucket, words_W = one_bucket()
    with pytest.raises(
        TransferError, match=r"sent version 3 bucket 0 .* expected version 4 bucket 0"
    ):
        received(bucket, words_W, {"param": torch.zeros(6)}).verify(4)


def test_a_message_carries_no_more_than_header_and_slices_in_whole_rows() -> None:
    bucket, words_W = one_bucket()
    assert (
        received(bucket, words_W, {"param": torch.zeros(6)}).message_u8.numel() == 2 * ROW_WORDS * 8
    )
