"""Pieces copy each element of a box to its place, whatever the strides, and can be cut by rows."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint_tools.assembly import (
    Piece,
    check_pieces,
    cut,
    find_row,
    join_pieces,
    make_pieces,
    whole,
)
from checkpoint_tools.stored import Chunk
from mcore_rl.weights.box import contiguous_strides
from tests.support.assembly_elements import element_pairs


def chunk_of(*shape: int) -> Chunk:
    num_bytes = int(np.prod(shape))
    return Chunk("t", "uint8", (0,) * len(shape), shape, "file", 0, num_bytes, False)


def places(pieces: list[Piece] | tuple[Piece, ...]) -> dict[int, int]:
    """Element of the tensor -> element of the chunk; asserts that none is written twice."""
    copied: dict[int, int] = {}
    for piece in pieces:
        for target, source in element_pairs(piece):
            assert target not in copied
            copied[target] = source
    return copied


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    before=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    after=st.lists(st.integers(0, 2), min_size=4, max_size=4),
)
def test_a_chunk_lands_where_numpy_puts_it(
    sizes: list[int], before: list[int], after: list[int]
) -> None:
    offset = tuple(before[: len(sizes)])
    shape = tuple(a + size + b for a, size, b in zip(offset, sizes, after, strict=False))
    chunk = Chunk("t", "uint8", offset, tuple(sizes), "file", 0, int(np.prod(sizes)), False)
    expected = np.full(shape, -1)
    box = tuple(slice(a, a + size) for a, size in zip(offset, sizes, strict=True))
    expected[box] = np.arange(np.prod(sizes)).reshape(sizes)
    copied = places(join_pieces("t", "uint8", shape, [chunk]).pieces)
    assert copied == {i: value for i, value in enumerate(expected.flat) if value >= 0}


def test_a_transposed_matrix_is_one_piece() -> None:
    (piece,) = make_pieces(chunk_of(5, 7), (7, 5), (0, (1, 7)), (0, (5, 1)), 5)
    expected = np.arange(35).reshape(5, 7).T.ravel()
    assert piece.transposed and piece.num_bytes == 35
    assert places([piece]) == dict(enumerate(expected.tolist()))


@given(
    rows=st.integers(1, 5),
    run=st.integers(1, 4),
    gap=st.integers(0, 3),
    transposed=st.booleans(),
    edges=st.lists(st.integers(0, 6), min_size=2, max_size=2),
)
def test_cut_takes_what_goes_to_the_rows(
    rows: int, run: int, gap: int, transposed: bool, edges: list[int]
) -> None:
    row = run + gap
    piece = Piece(chunk_of(rows, run), 0, gap, rows, run, row, transposed and rows > 1)
    start, stop = (row * edge for edge in sorted(edges))
    wanted = {at: source for at, source in places([piece]).items() if start <= at < stop}
    part = cut(piece, start, stop)
    if part is None:
        assert not wanted
        return
    source, count, length, target = part
    step = 1 if piece.transposed else length
    firsts = {target + n * row: source + n * step for n in range(count)}
    assert all(wanted[at] == source for at, source in firsts.items())
    assert count * length == len(wanted)


def test_a_part_that_is_scattered_over_its_chunk_is_refused(tmp_path: Path) -> None:
    chunk = Chunk("t", "uint8", (0, 0), (4, 4), str(tmp_path / "file"), 0, 16, False)
    strides = contiguous_strides(chunk.shape)
    with pytest.raises(
        ValueError, match=r"file: tensor 't': a part of shape \(4, 2\) is scattered"
    ):
        list(make_pieces(chunk, (4, 2), (0, strides), (0, (2, 1)), 2))


def test_boxes_with_a_gap_are_refused() -> None:
    with pytest.raises(ValueError, match=r"file: tensor 't' .* its parts hold 2 of 4 elements"):
        check_pieces("t", "uint8", (4,), [((0,), (2,))], [], where="file")


def test_an_empty_chunk_has_no_pieces() -> None:
    assert whole(chunk_of(0, 3)).pieces == ()
    assert find_row((2, 3, 4)) == 4
    assert find_row((4,)) == 1
