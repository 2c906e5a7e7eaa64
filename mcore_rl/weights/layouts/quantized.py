"""Layouts with block-FP8 matrices, and the checks that a plan makes on both of its sides.

    layout in bfloat16            QuantizedLayout
    weight [256, 128]             weight [256, 128], float8     weight_scale_inv [2, 1], float32
    rows 0-127 on rank 0     -->  rows 0-127 on rank 0          row 0 on rank 0
    rows 128-255 on rank 1        rows 128-255 on rank 1        row 1 on rank 1

A plan never cuts through a block, and the scales of a block travel with its values.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

from mcore_rl.weights.box import Box
from mcore_rl.weights.hf.fp8 import (
    BLOCK,
    FP8,
    SCALE_DTYPE,
    is_converted,
    scale_box,
    scale_name,
    scaled_name,
)
from mcore_rl.weights.layouts.layout import Layout, PlacedPiece, Placement


class QuantizedLayout:
    """The layout of engines that hold every projection as FP8 values and a scale per block."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._values = cache(_values)
        self._scales = cache(_scales)

    @property
    def num_ranks(self) -> int:
        return self._layout.num_ranks

    def placement(self, name: str) -> Placement:
        matrix = scaled_name(name)
        if matrix is not None and is_converted(matrix):
            return self._scales(self._layout.placement(matrix))
        placement = self._layout.placement(name)
        return self._values(placement) if is_converted(name) else placement

    def names(self, rank: int) -> Iterator[str]:
        return _with_scales(self._layout.names(rank))

    def all_names(self) -> Iterator[str]:
        return _with_scales(self._layout.all_names())


def _values(placement: Placement) -> Placement:
    return Placement(tuple(replace(piece, dtype=FP8) for piece in placement.pieces))


def _scales(placement: Placement) -> Placement:
    return Placement(tuple(map(_scales_of, placement.pieces)))


def _scales_of(piece: PlacedPiece) -> PlacedPiece:
    box = scale_box(Box("", piece.start, piece.stop))
    return PlacedPiece(box.start, box.stop, piece.ranks, SCALE_DTYPE)


def _with_scales(names: Iterable[str]) -> Iterator[str]:
    """Yield `names`, each quantized matrix followed by its scales."""
    for name in names:
        yield name
        if is_converted(name):
            yield scale_name(name)


def is_quantized(placement: Placement) -> bool:
    """Return whether the tensor is an FP8 matrix."""
    return bool(placement.pieces) and placement.pieces[0].dtype == FP8


def travels_with_matrix(name: str, target: Layout) -> bool:
    """Return whether HF tensor `name` holds the scales of a matrix that `target` has in FP8.

    Such scales travel with the values and are not planned by themselves.
    """
    matrix = scaled_name(name)
    return matrix is not None and is_quantized(target.placement(matrix))


def join_rows(placement: Placement) -> Placement:
    """Join pieces that the same ranks hold one below the other, because a block may span them."""
    joined: list[PlacedPiece] = []
    for piece in sorted(placement.pieces, key=lambda p: (p.start[1:], p.start)):
        if joined and _continues(joined[-1], piece):
            joined[-1] = replace(joined[-1], stop=piece.stop)
        else:
            joined.append(piece)
    return Placement(tuple(sorted(joined, key=lambda piece: piece.start)))


def _continues(above: PlacedPiece, below: PlacedPiece) -> bool:
    """Return whether `below` begins where `above` ends, with the same columns, ranks and dtype."""
    same_columns = (above.start[1:], above.stop[1:]) == (below.start[1:], below.stop[1:])
    same_holders = (above.ranks, above.dtype) == (below.ranks, below.dtype)
    return same_columns and same_holders and above.stop[0] == below.start[0]


def check_scales(name: str, target: Layout) -> None:
    """Raise ValueError unless every rank holds the scales of exactly its blocks of the matrix."""
    matrix = join_rows(target.placement(name))
    scales = join_rows(target.placement(scale_name(name)))
    if set(map(_scales_of, matrix.pieces)) != set(scales.pieces):
        rank = matrix.pieces[0].ranks[0]
        raise ValueError(
            f"target rank {rank} holds {name!r} in {FP8}, but {scale_name(name)!r} is not"
            f" a {SCALE_DTYPE} scale for each of its {BLOCK} x {BLOCK} blocks: serve weights in"
            " that format"
        )


def check_blocks(
    common: Box, shape: tuple[int, ...], held: PlacedPiece, needed: PlacedPiece
) -> None:
    """Check that the box that `held` and `needed` have in common consists of whole blocks.

    `shape` is that of the tensor. Raises ValueError naming tensor, rank and the piece that cuts a
    block.
    """
    if is_whole(common.start, common.stop, shape):
        return
    side, piece = ("source", held)
    if is_whole(held.start, held.stop, shape):
        side, piece = ("target", needed)
    raise ValueError(
        f"{side} rank {piece.ranks[0]} holds {common.name!r} {piece.start} to {piece.stop} of"
        f" {shape}, which cuts through {BLOCK} x {BLOCK} blocks of FP8 weights: choose"
        " tensor-parallel sizes that keep them whole"
    )


def is_whole(start: tuple[int, ...], stop: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a box of a matrix of `shape` begins and ends at the edges of blocks."""
    begins = not any(at % BLOCK for at in start)
    return begins and all(
        at % BLOCK == 0 or at == size for at, size in zip(stop, shape, strict=True)
    )


def shape_of(*placements: Placement) -> tuple[int, ...]:
    """Return the shape of the tensor that these placements cover between them."""
    stops = [piece.stop for placement in placements for piece in placement.pieces]
    return tuple(map(max, zip(*stops, strict=True)))
