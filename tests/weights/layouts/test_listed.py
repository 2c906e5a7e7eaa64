"""Layouts made of lists of shards: overlaps are cut up, every rank keeps what it holds."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.weights.box import Box, Shard
from mcore_rl.weights.layouts.layout import NOWHERE
from mcore_rl.weights.layouts.listed import ListedLayout


def shard(name: str, start: int, stop: int) -> Shard:
    return Shard(Box(name, (start,), (stop,)), "t", 0, (1,), "float32")


def test_pieces_that_overlap_are_cut_up_with_all_their_ranks() -> None:
    layout = ListedLayout([[shard("w", 0, 6)], [shard("w", 4, 8)], [shard("w", 0, 8)]])
    pieces = {(p.start[0], p.stop[0]): list(p.ranks) for p in layout.placement("w").pieces}
    assert pieces == {(0, 4): [0, 2], (4, 6): [0, 1, 2], (6, 8): [1, 2]}
    assert layout.placement("other") is NOWHERE


def test_a_tensor_of_two_dtypes_is_refused() -> None:
    half = dataclasses.replace(shard("w", 0, 4), dtype="bfloat16")
    with pytest.raises(ValueError, match="'w' is bfloat16 on rank 1, but float32 on another rank"):
        ListedLayout([[shard("w", 0, 4)], [half]])


def test_names_are_listed_by_rank_and_in_all() -> None:
    layout = ListedLayout([[shard("v", 0, 1), shard("u", 0, 1)], [], [shard("v", 1, 2)]])
    assert layout.num_ranks == 3
    assert [list(layout.names(rank)) for rank in range(3)] == [["u", "v"], [], ["v"]]
    assert sorted(layout.all_names()) == ["u", "v"]


SIZE = 6
EDGES = st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE)).filter(lambda e: e[0] < e[1])
BOXES = st.builds(
    lambda rows, columns: Box("w", (rows[0], columns[0]), (rows[1], columns[1])), EDGES, EDGES
)


def elements(box: Box) -> set[tuple[int, int]]:
    rows = range(box.start[0], box.stop[0])
    return {(row, column) for row in rows for column in range(box.start[1], box.stop[1])}


@given(st.lists(st.lists(BOXES, max_size=2), min_size=1, max_size=4))
def test_disjoint_pieces_give_every_rank_exactly_its_elements(held: list[list[Box]]) -> None:
    shards = [[Shard(box, "t", 0, (SIZE, 1), "float32") for box in boxes] for boxes in held]
    pieces = ListedLayout(shards).placement("w").pieces
    covered = [elements(Box("w", piece.start, piece.stop)) for piece in pieces]
    assert sum(map(len, covered)) == len(set().union(*covered))
    for rank, boxes in enumerate(held):
        by_layout = [
            part for part, piece in zip(covered, pieces, strict=True) if rank in piece.ranks
        ]
        assert set().union(*by_layout) == set().union(*map(elements, boxes))
