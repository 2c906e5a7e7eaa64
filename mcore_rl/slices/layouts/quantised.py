"""Layouts with block-FP8 matrices: an engine's by rule, and what a plan asks of both sides of one."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

from mcore_rl.slices.box import Box
from mcore_rl.slices.hf.fp8 import (
    BLOCK,
    FP8,
    SCALE_DTYPE,
    is_converted,
    scale_box,
    scale_name,
    scaled_name,
)
from mcore_rl.slices.layouts.layout import Layout, Piece, Placement


class QuantisedLayout:
    """`layout` of engines that hold every projection as FP8 values and scales of its blocks."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._values, self._scales = cache(_values), cache(_scales)

    @property
    def num_ranks(self) -> int:
        return self._layout.num_ranks

    def placement(self, name: str) -> Placement:
        matrix = scaled_name(name)
        if matrix is not None and is_converted(matrix):
            return self._scales(self._layout.placement(matrix))
        found = self._layout.placement(name)
        return self._values(found) if is_converted(name) else found

    def names(self, rank: int) -> Iterator[str]:
        return _with_scales(self._layout.names(rank))

    def all_names(self) -> Iterator[str]:
        return _with_scales(self._layout.all_names())


def _values(placement: Placement) -> Placement:
    return Placement(tuple(replace(piece, dtype=FP8) for piece in placement.pieces))


def _scales(placement: Placement) -> Placement:
    return Placement(tuple(map(_scales_of, placement.pieces)))


def _scales_of(piece: Piece) -> Piece:
    box = scale_box(Box("", piece.start, piece.stop))
    return Piece(box.start, box.stop, piece.ranks, SCALE_DTYPE)


def _with_scales(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        yield name
        if is_converted(name):
            yield scale_name(name)


def is_quantised(placement: Placement) -> bool:
    return bool(placement.pieces) and placement.pieces[0].dtype == FP8


def travels_with_matrix(name: str, target: Layout) -> bool:
    """Whether HF tensor `name` holds the scales of a matrix that `target` wants in FP8."""
    matrix = scaled_name(name)
    return matrix is not None and is_quantised(target.placement(matrix))


def join_rows(placement: Placement) -> Placement:
    """Pieces that the same ranks hold one below the other as one: a block may span them."""
    joined: list[Piece] = []
    for piece in sorted(placement.pieces, key=lambda p: (p.start[1:], p.start)):
        above = joined[-1] if joined else None
        if (
            above
            and above == replace(piece, start=above.start, stop=above.stop)
            and _touch(above, piece)
        ):
            joined[-1] = replace(above, stop=piece.stop)
        else:
            joined.append(piece)
    return Placement(tuple(sorted(joined, key=lambda piece: piece.start)))


def _touch(above: Piece, below: Piece) -> bool:
    columns = (above.start[1:], above.stop[1:]) == (below.start[1:], below.stop[1:])
    return columns and above.stop[0] == below.start[0]


def check_scales(name: str, target: Layout) -> None:
    """ValueError unless whoever wants blocks of the FP8 matrix `name` wants the scales of just these."""
    matrix, scales = (
        join_rows(target.placement(name)),
        join_rows(target.placement(scale_name(name))),
    )
    if set(map(_scales_of, matrix.pieces)) != set(scales.pieces):
        rank = matrix.pieces[0].ranks[0]
        raise ValueError(
            f"target rank {rank} holds {name!r} in {FP8}, but {scale_name(name)!r} is not"
            f" a {SCALE_DTYPE} scale for each of its {BLOCK} x {BLOCK} blocks: serve weights in that format"
        )


def check_blocks(common: Box, shape: tuple[int, ...], held: Piece, wanted: Piece) -> None:
    """ValueError naming tensor, rank and box unless `common`, of a tensor of `shape`, is of whole blocks."""
    if is_whole(common.start, common.stop, shape):
        return
    side, piece = ("target", wanted) if is_whole(held.start, held.stop, shape) else ("source", held)
    raise ValueError(
        f"{side} rank {piece.ranks[0]} holds {common.name!r} {piece.start} to {piece.stop} of {shape}, which"
        f" cuts through {BLOCK} x {BLOCK} blocks of FP8 weights: choose tensor-parallel sizes that keep them"
        " whole"
    )


def is_whole(start: tuple[int, ...], stop: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a box begins and ends where blocks do, or at the end of the matrix of `shape`."""
    begins = not any(at % BLOCK for at in start)
    return begins and all(
        at % BLOCK == 0 or at == size for at, size in zip(stop, shape, strict=True)
    )


def shape_of(*placements: Placement) -> tuple[int, ...]:
    """Of the tensor whose pieces these are, if they are all of it."""
    stops = [piece.stop for placement in placements for piece in placement.pieces]
    return tuple(map(max, zip(*stops, strict=True)))
