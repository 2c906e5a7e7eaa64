"""Derives where the weights below factors, and factors, lie from the layouts of all weights.

    W [out, in] of a trainer rank, or parts of it   ->  all of A and B on that rank
    W [out, in] of an engine rank, or parts of it   ->  A [r, columns], B [rows, r]

So ranks that know the recorded layouts of a link need not list their factors for one another.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from mcore_rl.weights.box import Shape
from mcore_rl.weights.layouts.layout import (
    NOWHERE,
    HfTensors,
    Layout,
    PlacedPiece,
    Placement,
    Ranks,
)
from mcore_rl.weights.layouts.listed import RecordedLayouts
from mcore_rl.weights.lora.places import (
    FIRST,
    SECOND,
    STAMP,
    STAMP_DTYPE,
    Content,
    list_factor_shapes,
    make_stamp_shard,
)
from mcore_rl.weights.lora.targets import list_matrices
from mcore_rl.weights.models import hf_tensor_shapes


@dataclass(frozen=True)
class AdapterLayouts:
    """The numbers that the layouts of a link with that content follow from.

    recorded           encoded RecordedLayouts of all weights
    targets, experts   what is adapted, as in LoraConfig
    is_whole           an engine rank with a part of a matrix has whole factors
    """

    recorded: str
    content: Content
    rank: int
    targets: tuple[str, ...]
    experts: bool
    is_whole: bool = False

    def encode(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def decode(text: str) -> "AdapterLayouts":
        fields: dict[str, Any] = json.loads(text)
        return AdapterLayouts(**{**fields, "targets": tuple(fields["targets"])})

    @cached_property
    def _all(self) -> RecordedLayouts:
        # W0 and factors travel in the trainer's dtype, whatever engines serve.
        return replace(RecordedLayouts.decode(self.recorded), quantization="none")

    @cached_property
    def _matrices(self) -> dict[str, Shape]:
        config = self._all.hf_config
        shapes = hf_tensor_shapes(config)
        return {name: shapes[name] for name in list_matrices(config, self.targets, self.experts)}

    def source(self) -> "AdaptedLayout":
        """Return the trainer's layout. Raises ValueError if the sizes do not divide the model."""
        return self._make(self._all.source(), is_whole=True)

    def target(self) -> "AdaptedLayout":
        """Return the engines' layout. Raises ValueError if the sizes do not divide the model."""
        return self._make(self._all.target(), is_whole=self.is_whole)

    def _make(self, layout: Layout, *, is_whole: bool) -> "AdaptedLayout":
        if self.content == "base":
            return AdaptedLayout(layout, self._matrices, self._all.dtype)
        return FactorLayout(layout, self._matrices, self._all.dtype, self.rank, is_whole=is_whole)


class AdaptedLayout:
    """The layout of the adapted matrices alone."""

    def __init__(self, layout: Layout, matrices: Mapping[str, Shape], dtype: str) -> None:
        self._layout = layout
        self._matrices = matrices
        self._dtype = dtype

    @property
    def num_ranks(self) -> int:
        return self._layout.num_ranks

    def placement(self, name: str) -> Placement:
        return self._layout.placement(name) if name in self._matrices else NOWHERE

    def names(self, rank: int) -> Iterator[str]:
        return (name for name in self._layout.names(rank) if name in self._matrices)

    def all_names(self) -> Iterator[str]:
        return iter(self._matrices)

    def hf_tensors(self) -> HfTensors:
        return {name: (shape, self._dtype) for name, shape in self._matrices.items()}


class FactorLayout(AdaptedLayout):
    """The layout of factors and of the stamp that travels with them."""

    def __init__(
        self,
        layout: Layout,
        matrices: Mapping[str, Shape],
        dtype: str,
        rank: int,
        *,
        is_whole: bool,
    ) -> None:
        """`is_whole`: a rank with a part of a matrix has whole factors."""
        super().__init__(layout, matrices, dtype)
        self._rank = rank
        self._is_whole = is_whole
        self._factors: dict[tuple[Placement, str], Placement] = {}
        stamp = make_stamp_shard("").box
        every = Ranks.grid(0, (layout.num_ranks, 1))
        self._stamp = Placement((PlacedPiece(stamp.start, stamp.stop, every, STAMP_DTYPE),))

    def placement(self, name: str) -> Placement:
        if name == STAMP:
            return self._stamp
        matrix, end = name[: -len(FIRST)], name[-len(FIRST) :]
        if matrix not in self._matrices or end not in (FIRST, SECOND):
            return NOWHERE
        key = self._layout.placement(matrix), end
        if key not in self._factors:
            self._factors[key] = self._make_placement(key[0], end, self._matrices[matrix])
        return self._factors[key]

    def names(self, rank: int) -> Iterator[str]:
        return _name_factors(super().names(rank))

    def all_names(self) -> Iterator[str]:
        return _name_factors(self._matrices)

    def hf_tensors(self) -> HfTensors:
        shapes = list_factor_shapes(self._matrices, self._rank)
        stamp = make_stamp_shard("").box.stop
        return {STAMP: (stamp, STAMP_DTYPE)} | {
            name: (shape, self._dtype) for name, shape in shapes.items()
        }

    def _make_placement(self, weights: Placement, end: str, shape: Shape) -> Placement:
        axis = 1 if end == FIRST else 0
        ranks_of: dict[tuple[int, int], set[int]] = defaultdict(set)
        for piece in weights.pieces:
            span = (0, shape[axis]) if self._is_whole else (piece.start[axis], piece.stop[axis])
            ranks_of[span] |= set(piece.ranks)
        spans = sorted(ranks_of)
        if any(before[1] > after[0] for before, after in pairwise(spans)):
            raise ValueError(f"parts of a matrix overlap in {spans}")
        pieces = []
        for start, stop in spans:
            corner = ((0, start), (self._rank, stop)) if axis else ((start, 0), (stop, self._rank))
            ranks = Ranks.from_iterable(ranks_of[start, stop])
            pieces.append(PlacedPiece(*corner, ranks, self._dtype))
        return Placement(tuple(pieces))


def _name_factors(matrices: Iterable[str] | Collection[str]) -> Iterator[str]:
    """Yield the stamp, and the factors of each matrix."""
    yield STAMP
    for name in matrices:
        yield name + FIRST
        yield name + SECOND
