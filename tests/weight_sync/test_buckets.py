"""Buckets: every element once, messages of bounded size, an order that cannot deadlock."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.tools.doctor.toy_engine import column_cut, make_tensors, row_cut
from mcore_rl.weight_sync.buckets import Bucket, bound_message_bytes, plan_buckets, split_box
from mcore_rl.weight_sync.verify import ROW_WORDS
from mcore_rl.weights.box import Box
from mcore_rl.weights.hf.fp8 import make_scale_box
from mcore_rl.weights.layouts.listed import ListedLayout
from mcore_rl.weights.plan.local import plan_recvs, plan_sends
from mcore_rl.weights.plan.shared_region import Slice
from mcore_rl.weights.plan.shares import RegularHosts

shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


@given(shape=shapes, max_numel=st.integers(1, 40))
def test_a_box_is_cut_into_bounded_parts_that_cover_it_once(
    shape: tuple[int, ...], max_numel: int
) -> None:
    box = Box("w", tuple(3 for _ in shape), tuple(3 + n for n in shape))
    parts = split_box(box, max_numel)
    elements: Counter[tuple[int, ...]] = Counter()
    for part in parts:
        elements.update(product(*map(range, part.start, part.stop)))
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
    flows: Flows = {}
    for rank in range(num_targets):
        flows |= recvs_of(rank, *layouts)
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


def test_slices_of_a_power_of_two_fill_a_bucket_in_spite_of_their_padding() -> None:
    slices = [Slice(Box(f"w{i}", (0,), (1024,)), "float32") for i in range(8)]
    assert [b.num_bytes for b in plan_buckets({(0, 0): slices}, 1, 16384)] == [16384] * 2
    tiny = [Slice(Box(f"w{i}", (0,), (1,)), "float32") for i in range(100)]
    buckets = plan_buckets({(0, 0): tiny}, 1, 4096)
    assert max(b.num_words * 8 for b in buckets) <= 4096 * 9 / 8 + ROW_WORDS * 8
    assert sum(b.num_bytes for b in buckets) == 400


@pytest.mark.parametrize("bucket_bytes", [4096, 100_000, 1 << 20])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 1 / 3, 1 / 2, 1.0])
def test_no_message_takes_more_memory_than_planning_counts(bucket_bytes: int, share: float) -> None:
    numel = max(1, int(bucket_bytes * share / 4))
    slices = [Slice(Box(f"w{i}", (0,), (numel,)), "float32") for i in range(400)]
    buckets = plan_buckets({(0, 0): slices}, 1, bucket_bytes)
    largest = max(bucket.num_words * 8 for bucket in buckets)
    assert largest <= bound_message_bytes(bucket_bytes)
    if share == 1 / 2:
        assert largest > bucket_bytes, "padding and header are not for nothing"


@pytest.mark.parametrize("bucket_bytes", [64, 4096])
@pytest.mark.parametrize(("num_sources", "num_targets"), [(2, 3), (4, 4), (5, 2)])
def test_ranks_that_work_through_their_own_buckets_in_order_never_block_each_other(
    num_sources: int, num_targets: int, bucket_bytes: int
) -> None:
    layouts = layouts_of(num_sources, num_targets)

    def cut(flows: Flows) -> list[Bucket]:
        return plan_buckets(flows, num_targets, bucket_bytes)

    sends = {rank: cut(sends_of(rank, *layouts)) for rank in range(num_sources)}
    recvs = {rank: cut(recvs_of(rank, *layouts)) for rank in range(num_targets)}
    while any(sends.values()) or any(recvs.values()):
        heads = {rank: queue[0] for rank, queue in sends.items() if queue}
        movable = [b for b in heads.values() if recvs[b.target_rank][:1] == [b]]
        assert movable, "every sender waits for a receiver that waits for another"
        for bucket in movable:
            sends[bucket.source_rank].pop(0)
            recvs[bucket.target_rank].pop(0)


def test_a_round_gives_each_sender_a_receiver_of_its_own() -> None:
    """Sender k begins with receiver k, then k + 1: no two of them wait for the same one."""
    one = [Slice(Box("w", (0,), (4,)), "float32")]
    flows = {(source, target): one for target in range(4) for source in range(4)}
    pairs = [(b.source_rank, b.target_rank) for b in plan_buckets(flows, 4, 1 << 20)]
    assert pairs[:5] == [(0, 0), (1, 1), (2, 2), (3, 3), (0, 1)]
    rounds = [pairs[at : at + 4] for at in range(0, 16, 4)]
    assert all(len({target for _, target in each}) == 4 for each in rounds)
    assert all([source for source, _ in each] == [0, 1, 2, 3] for each in rounds)


def test_a_pairs_second_message_comes_after_every_first_one() -> None:
    two = [Slice(Box(name, (0,), (4,)), "float32") for name in "ab"]
    flows = {(source, target): two for target in range(2) for source in range(2)}
    buckets = plan_buckets(flows, 2, 16)
    assert [bucket.index for bucket in buckets] == [0] * 4 + [1] * 4


def test_fp8_values_and_their_scales_share_a_bucket() -> None:
    matrix = Slice(Box("w", (0, 0), (512, 256)), "float8_e4m3fn")
    buckets = plan_buckets({(0, 0): [matrix]}, 1, 2 * 128 * 256)
    assert len(buckets) > 1
    for bucket in buckets:
        values = [piece for piece in bucket.pieces if piece.dtype == "float8_e4m3fn"]
        scales = [piece for piece in bucket.pieces if piece.dtype == "float32"]
        assert {piece.box for piece in scales} == {make_scale_box(piece.box) for piece in values}
        assert all(piece.box.start[0] % 128 == 0 for piece in values)


def test_a_bucket_is_named_by_its_first_and_last_tensor() -> None:
    slices = [Slice(Box(name, (0,), (4,)), "float32") for name in "abc"]
    (bucket,) = plan_buckets({(0, 0): slices}, 1, 1 << 20)
    (alone,) = plan_buckets({(0, 0): slices[:1]}, 1, 1 << 20)
    assert (str(bucket), str(alone)) == ("bucket 0 (a to c)", "bucket 0 (a)")
