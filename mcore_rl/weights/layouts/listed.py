"""Makes the layouts of both sides of a weight sync, of lists of shards or of a few numbers.

    config.json, dtype  + MegatronSizes(tp=2, ...)  -->  source(): the trainer's layout
                        + SGLangSizes(tp=4, ...)    -->  target(): the engines' layout

These travel to all ranks as JSON, and every rank derives from them what all other ranks hold. A
list of every rank's shards was traced, or read from metadata. Boxes that overlap are cut up until
all ranks of a piece hold all of it:

    rank 0 holds rows 0-5        pieces  rows 0-3 on rank 0
    rank 1 holds rows 4-7   -->          rows 4-5 on ranks 0 and 1
                                         rows 6-7 on rank 1

A layout may have block-FP8 matrices. A plan never cuts through a block, and the scales of a block
travel with its values:

    layout in bfloat16            QuantizedLayout
    weight [256, 128]             weight [256, 128], float8     weight_scale_inv [2, 1], float32
    rows 0-127 on rank 0     -->  rows 0-127 on rank 0          row 0 on rank 0
    rows 128-255 on rank 1        rows 128-255 on rank 1        row 1 on rank 1
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from mcore_rl.weights.box import Box, Shard, subtract
from mcore_rl.weights.hf.fp8 import (
    BLOCK,
    FP8,
    SCALE_DTYPE,
    find_scaled_name,
    is_converted,
    make_scale_box,
    make_scale_name,
)
from mcore_rl.weights.hf.low_precision import Quantization, check_whole, is_whole
from mcore_rl.weights.layouts.layout import (
    NOWHERE,
    DescribedLayout,
    HfTensors,
    Layout,
    PlacedPiece,
    Placement,
    Ranks,
)
from mcore_rl.weights.layouts.megatron import MegatronLayout, MegatronSizes
from mcore_rl.weights.layouts.packed_experts import PackedExpertsLayout
from mcore_rl.weights.layouts.sglang import SGLangLayout
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from mcore_rl.weights.models import family_of


class QuantizedLayout:
    """The layout of engines that hold every projection as FP8 values and a scale per block."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._values = cache(_make_values)
        self._scales = cache(_make_scales)

    @property
    def num_ranks(self) -> int:
        return self._layout.num_ranks

    def placement(self, name: str) -> Placement:
        matrix = find_scaled_name(name)
        if matrix is not None and is_converted(matrix):
            return self._scales(self._layout.placement(matrix))
        placement = self._layout.placement(name)
        return self._values(placement) if is_converted(name) else placement

    def names(self, rank: int) -> Iterator[str]:
        return _add_scales(self._layout.names(rank))

    def all_names(self) -> Iterator[str]:
        return _add_scales(self._layout.all_names())


def _make_values(placement: Placement) -> Placement:
    return Placement(tuple(replace(piece, dtype=FP8) for piece in placement.pieces))


def _make_scales(placement: Placement) -> Placement:
    return Placement(tuple(map(_find_scales, placement.pieces)))


def _find_scales(piece: PlacedPiece) -> PlacedPiece:
    box = make_scale_box(Box("", piece.start, piece.stop))
    return PlacedPiece(box.start, box.stop, piece.ranks, SCALE_DTYPE)


def _add_scales(names: Iterable[str]) -> Iterator[str]:
    """Yield `names`, each quantized matrix followed by its scales."""
    for name in names:
        yield name
        if is_converted(name):
            yield make_scale_name(name)


def is_quantized(placement: Placement) -> bool:
    """Return whether the tensor is an FP8 matrix."""
    return bool(placement.pieces) and placement.pieces[0].dtype == FP8


def travels_with_matrix(name: str, target: Layout) -> bool:
    """Return whether HF tensor `name` holds the scales of a matrix that `target` has in FP8.

    Such scales travel with the values and are not planned by themselves.
    """
    matrix = find_scaled_name(name)
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
    scales = join_rows(target.placement(make_scale_name(name)))
    if set(map(_find_scales, matrix.pieces)) != set(scales.pieces):
        rank = matrix.pieces[0].ranks[0]
        raise ValueError(
            f"target rank {rank} holds {name!r} in {FP8}, but {make_scale_name(name)!r} is not"
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
    if is_whole("fp8", common.start, common.stop, shape):
        return
    for side, piece in (("source", held), ("target", needed)):
        part = Box(common.name, piece.start, piece.stop)
        check_whole("fp8", part, shape, f"{side} rank {piece.ranks[0]}")


def find_shape(*placements: Placement) -> tuple[int, ...]:
    """Return the shape of the tensor that these placements cover between them."""
    stops = [piece.stop for placement in placements for piece in placement.pieces]
    return tuple(map(max, zip(*stops, strict=True)))


@dataclass(frozen=True)
class RecordedLayouts:
    """The numbers that the layouts of both sides follow from.

    hf_config      config.json
    dtype          torch name of the model's dtype on both sides
    quantization   of what engines hold: projections in FP8, or routed experts in INT4
    """

    hf_config: Mapping[str, Any]
    dtype: str
    trainer: MegatronSizes
    engines: SGLangSizes
    quantization: Quantization = "none"

    def find_trained(self) -> MegatronLayout:
        """Return the layout of what trainer ranks hold.

        Raises ValueError if the sizes do not divide the model.
        """
        return MegatronLayout(family_of(self.hf_config), self.hf_config, self.trainer, self.dtype)

    def source(self) -> DescribedLayout:
        """Return the layout of what trainer ranks send; raises as `find_trained`."""
        layout = self.find_trained()
        return PackedExpertsLayout(layout) if self.quantization == "int4" else layout

    def target(self) -> Layout:
        """Return the engines' layout. Raises ValueError if the sizes do not divide the model."""
        layout = SGLangLayout(family_of(self.hf_config), self.hf_config, self.engines, self.dtype)
        if self.quantization == "int4":
            return PackedExpertsLayout(layout)
        return QuantizedLayout(layout) if self.quantization == "fp8" else layout

    def encode(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def decode(text: str) -> "RecordedLayouts":
        fields = json.loads(text)
        stage_layers = tuple(fields["trainer"].pop("stage_layers"))
        trainer = MegatronSizes(**fields["trainer"], stage_layers=stage_layers)
        engines = SGLangSizes(**fields["engines"])
        return RecordedLayouts(
            fields["hf_config"], fields["dtype"], trainer, engines, fields["quantization"]
        )


class ListedLayout:
    """A layout that grows with the shards of all ranks: for few ranks, and for checking rules."""

    def __init__(self, shards: Sequence[Iterable[Shard]]) -> None:
        """`shards[rank]` is what a rank holds. Raises ValueError naming a tensor of two dtypes."""
        self._names = [sorted({shard.box.name for shard in held}) for held in shards]
        self._dtypes: dict[str, str] = {}
        self._ranks_of: dict[str, dict[Box, set[int]]] = defaultdict(lambda: defaultdict(set))
        for rank, held in enumerate(shards):
            for shard in held:
                name = shard.box.name
                if self._dtypes.setdefault(name, shard.dtype) != shard.dtype:
                    raise ValueError(
                        f"{name!r} is {shard.dtype} on rank {rank}, but {self._dtypes[name]} on"
                        " another rank"
                    )
                self._ranks_of[name][shard.box].add(rank)
        self.placement = cache(self._placement)

    @property
    def num_ranks(self) -> int:
        return len(self._names)

    def names(self, rank: int) -> Iterator[str]:
        return iter(self._names[rank])

    def all_names(self) -> Iterator[str]:
        return iter(self._ranks_of)

    def hf_tensors(self) -> HfTensors:
        """Return HF name -> (shape, dtype) of every tensor, as far as its boxes reach."""
        dtypes = self._dtypes
        return {
            name: (tuple(map(max, zip(*(box.stop for box in boxes), strict=True))), dtypes[name])
            for name, boxes in self._ranks_of.items()
        }

    def _placement(self, name: str) -> Placement:
        if name not in self._ranks_of:
            return NOWHERE
        pieces = _refine(self._ranks_of[name])
        return Placement(
            tuple(
                PlacedPiece(box.start, box.stop, Ranks.from_iterable(ranks), self._dtypes[name])
                for box, ranks in sorted(pieces, key=lambda piece: piece[0].start)
            )
        )


def _refine(ranks_of: dict[Box, set[int]]) -> list[tuple[Box, set[int]]]:
    """Cut boxes that may overlap into disjoint boxes, each with all ranks that hold it."""
    done: list[tuple[Box, set[int]]] = []
    for box in sorted(ranks_of, key=lambda box: (box.start, box.stop)):
        rest = [box]
        refined: list[tuple[Box, set[int]]] = []
        for other, ranks in done:
            common = box.intersect(other)
            if common is None:
                refined.append((other, ranks))
                continue
            refined.append((common, ranks | ranks_of[box]))
            refined += [(part, ranks) for part in subtract(other, common)]
            rest = [part for piece in rest for part in _cut_out(piece, common)]
        done = refined + [(part, ranks_of[box]) for part in rest]
    return done


def _cut_out(box: Box, hole: Box) -> list[Box]:
    """Return `box` without its intersection with `hole`, as disjoint boxes."""
    common = box.intersect(hole)
    return [box] if common is None else subtract(box, common)
