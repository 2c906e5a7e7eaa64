"""Regions cut at any fraction: parts are boxes, adjoin, and respect the granularity."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.weights.box import Box
from mcore_rl.weights.hf.fp8 import BLOCK, FP8
from mcore_rl.weights.layouts.layout import Ranks
from mcore_rl.weights.plan.shared_region import BoxSpan, SharedRegion, Slice, SplitGranularity

RANKS = Ranks.from_iterable([0])
FINE = SplitGranularity(min_bytes=1)


def region(
    spans: list[BoxSpan], dtype: str = "float32", granularity: SplitGranularity = FINE
) -> SharedRegion:
    return SharedRegion(RANKS, RANKS, dtype, spans, granularity)


def parts_of(whole: SharedRegion, parts: int) -> list[tuple[Slice, ...]]:
    cuts = [whole.cut(part, parts) for part in range(parts + 1)]
    return [whole.slices(a, b) for a, b in pairwise(cuts)]


def rows(piece: Slice) -> tuple[str, int, int]:
    return piece.box.name, piece.box.start[0], piece.box.stop[0]


def test_halves_of_the_region_in_the_picture() -> None:
    spans = [
        ("v_proj", (0, 0), (4, 256)),
        ("k_proj", (8, 0), (12, 256)),
        ("k_proj", (0, 0), (4, 256)),
    ]
    first, second = parts_of(region(spans), 2)
    assert list(map(rows, first)) == [("k_proj", 0, 4), ("k_proj", 8, 10)]
    assert list(map(rows, second)) == [("k_proj", 10, 12), ("v_proj", 0, 4)]


def test_small_boxes_and_scalars_are_not_cut() -> None:
    spans = [("scalar", (), ()), ("w", (0,), (8,))]
    whole = region(spans, granularity=SplitGranularity(min_bytes=33))
    pieces = [piece for part in parts_of(whole, 3) for piece in part]
    assert [piece.box.shape for piece in pieces] == [(), (8,)]


@pytest.mark.parametrize(("rows_per_cut", "dtype"), [(1, "float32"), (6, "float32"), (48, FP8)])
def test_cuts_lie_at_multiples_of_rows_and_of_blocks(rows_per_cut: int, dtype: str) -> None:
    multiple = rows_per_cut if dtype != FP8 else 3 * BLOCK
    granularity = SplitGranularity(min_bytes=1, rows=rows_per_cut)
    whole = region([("w", (0, 0), (10 * BLOCK, 3))], dtype, granularity)
    for part in parts_of(whole, 7):
        for _, start, _ in map(rows, part):
            assert start % multiple == 0


def test_fp8_slices_count_the_scales_of_their_blocks() -> None:
    piece = Slice(Box("w.weight", (128, 0), (300, 256)), FP8)
    assert piece.scales == Slice(Box("w.weight_scale_inv", (1, 0), (3, 2)), "float32")
    assert piece.num_bytes == 172 * 256 + 4 * 4
    assert Slice(piece.box, "bfloat16").scales is None
    assert region([("w.weight", (128, 0), (300, 256))], FP8).num_bytes == piece.num_bytes


SPANS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(1, 300), st.integers(1, 5)),
    min_size=1,
    max_size=3,
    unique_by=lambda span: span[0],
)


@given(SPANS, st.sampled_from(["float32", "bfloat16", FP8]), st.integers(1, 9), st.integers(1, 50))
def test_parts_adjoin_and_hold_every_element_once(
    shapes: list[tuple[str, int, int]], dtype: str, parts: int, rows_per_cut: int
) -> None:
    spans = [(name, (0, 0), (num_rows, width)) for name, num_rows, width in shapes]
    whole = region(spans, dtype, SplitGranularity(min_bytes=1, rows=rows_per_cut))
    slices = [piece for part in parts_of(whole, parts) for piece in part]
    assert slices == sorted(slices, key=rows)
    assert sum(piece.num_bytes for piece in slices) == whole.num_bytes
    for name, num_rows, width in shapes:
        mine = [piece.box for piece in slices if piece.box.name == name]
        edges = [(box.start[0], box.stop[0]) for box in mine]
        assert edges[0][0] == 0 and edges[-1][1] == num_rows
        assert all(a[1] == b[0] for a, b in pairwise(edges))
        assert all(box.shape[1] == width for box in mine)
    before = [whole.bytes_before(whole.cut(part, parts)) for part in range(parts + 1)]
    sizes = [sum(piece.num_bytes for piece in part) for part in parts_of(whole, parts)]
    assert [b - a for a, b in pairwise(before)] == sizes


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 10**6), st.integers(1, 9)), min_size=1),
    st.sampled_from(["float32", FP8]),
    st.sampled_from([1, 3, 2048, 10**5]),
    st.sampled_from([SplitGranularity(), SplitGranularity(min_bytes=1, rows=5)]),
)
def test_many_cuts_at_a_time_are_the_single_ones(
    shapes: list[tuple[int, int, int]], dtype: str, parts: int, granularity: SplitGranularity
) -> None:
    spans: list[BoxSpan] = [("scalar", (), ())] if dtype != FP8 else []
    for i, (first, num_rows, width) in enumerate(shapes):
        spans.append((f"w{i}", (first, 0), (first + num_rows, width)))
    whole = region(spans, dtype, granularity)
    numbers = np.unique(np.linspace(0, parts, 50, dtype=np.int64))
    expected = [list(whole.cut(part, parts)) for part in numbers.tolist()]
    assert whole.cut_all(numbers, parts).tolist() == expected


def test_many_cuts_of_a_tensor_whose_products_pass_int64() -> None:
    whole = region([("flat", (0,), (2**33,))])
    cuts = whole.cut_all(np.arange(4), 3).tolist()
    assert cuts == [[0, 0], [0, 2**33 // 3], [0, 2 * 2**33 // 3], [1, 0]]
