"""The layout of ranks whose routed experts are INT4 words and scales, as files have them.

    layout in bfloat16              PackedExpertsLayout
    up_proj.weight [64, 256]        .weight_packed [64, 32], int32    .weight_scale [64, 8]
    columns 0-127 on rank 0    -->  columns 0-15 on rank 0            columns 0-3 on rank 0
    columns 128-255 on rank 1       columns 16-31 on rank 1           columns 4-7 on rank 1

Both sides of a sync have it where engines serve INT4: trainer ranks quantize what they hold before
they send it (weight_sync/packed_experts.py). A plan then moves words and scales as it moves any
other tensors.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

from mcore_rl.weights.hf.int4 import (
    GROUP,
    PACKED,
    PACKED_DTYPE,
    PER_WORD,
    SCALE,
    SCALE_DTYPE,
    list_part_names,
    split_part,
)
from mcore_rl.weights.hf.low_precision import is_rounded
from mcore_rl.weights.layouts.layout import (
    NOWHERE,
    DescribedLayout,
    HfTensors,
    PlacedPiece,
    Placement,
)

PARTS = {PACKED: (PER_WORD, PACKED_DTYPE), SCALE: (GROUP, SCALE_DTYPE)}
"""Suffix of a tensor that encodes a matrix -> columns of the matrix in each of its own, dtype."""


class PackedExpertsLayout:
    """A layout whose routed experts are packed; all other tensors are where they were."""

    def __init__(self, layout: DescribedLayout) -> None:
        self._layout = layout
        self._pack = cache(_pack)

    @property
    def num_ranks(self) -> int:
        return self._layout.num_ranks

    def placement(self, name: str) -> Placement:
        """As of any layout. Raises ValueError naming a piece that cuts a group of columns."""
        matrix, suffix = split_part(name) or (name, "")
        if not is_rounded("int4", matrix):
            return self._layout.placement(name)
        return self._pack(self._layout.placement(matrix), suffix) if suffix in PARTS else NOWHERE

    def names(self, rank: int) -> Iterator[str]:
        return _list_parts(self._layout.names(rank))

    def all_names(self) -> Iterator[str]:
        return _list_parts(self._layout.all_names())

    def hf_tensors(self) -> HfTensors:
        """Return HF name -> (shape, dtype) of every tensor."""
        described: dict[str, tuple[tuple[int, ...], str]] = {}
        for name, (shape, dtype) in self._layout.hf_tensors().items():
            if not is_rounded("int4", name):
                described[name] = shape, dtype
                continue
            for suffix, (columns, packed_dtype) in PARTS.items():
                described[name + suffix] = (shape[0], shape[1] // columns), packed_dtype
        return described


def _list_parts(names: Iterable[str]) -> Iterator[str]:
    """Yield `names`, a packed matrix as its words and its scales."""
    for name in names:
        if is_rounded("int4", name):
            yield from list_part_names(name)[:2]
        else:
            yield name


def _pack(placement: Placement, suffix: str) -> Placement:
    columns, dtype = PARTS[suffix]
    return Placement(tuple(_divide(piece, columns, dtype) for piece in placement.pieces))


def _divide(piece: PlacedPiece, columns: int, dtype: str) -> PlacedPiece:
    (first_row, first), (last_row, last) = piece.start, piece.stop
    if first % GROUP or last % GROUP:
        raise ValueError(
            f"rank {piece.ranks[0]} holds columns {first} to {last} of an expert's matrix, which"
            f" cuts through groups of {GROUP} columns of INT4 weights: choose tensor-parallel sizes"
            " that keep them whole"
        )
    start, stop = (first_row, first // columns), (last_row, last // columns)
    return replace(piece, start=start, stop=stop, dtype=dtype)
