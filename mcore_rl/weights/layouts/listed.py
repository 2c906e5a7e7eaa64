"""Makes a layout from lists of every rank's shards, which were traced or read from metadata.

    rank 0 holds rows 0-5        pieces  rows 0-3 on rank 0
    rank 1 holds rows 4-7   -->          rows 4-5 on ranks 0 and 1
                                         rows 6-7 on rank 1

Boxes that overlap are cut up until all ranks of a piece hold all of it.

Both layouts of a weight sync as a few numbers, which travel to all ranks as JSON.

    config.json, dtype  + MegatronSizes(tp=2, ...)  -->  source(): the trainer's layout
                        + SGLangSizes(tp=4, ...)    -->  target(): the engines' layout

Every rank derives from them what all other ranks hold.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from mcore_rl.weights.box import Box, Shard, subtract
from mcore_rl.weights.layouts.layout import NOWHERE, HfTensors, Layout, PlacedPiece, Placement
from mcore_rl.weights.layouts.megatron import MegatronLayout, MegatronSizes
from mcore_rl.weights.layouts.quantized import QuantizedLayout
from mcore_rl.weights.layouts.ranks import Ranks
from mcore_rl.weights.layouts.sglang import SGLangLayout
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from mcore_rl.weights.models import family_of


@dataclass(frozen=True)
class RecordedLayouts:
    """The numbers that the layouts of both sides follow from.

    hf_config   config.json
    dtype       torch name of the model's dtype on both sides
    fp8         whether engines hold projections in FP8
    """

    hf_config: Mapping[str, Any]
    dtype: str
    trainer: MegatronSizes
    engines: SGLangSizes
    fp8: bool = False

    def source(self) -> MegatronLayout:
        """Return the trainer's layout. Raises ValueError if the sizes do not divide the model."""
        return MegatronLayout(family_of(self.hf_config), self.hf_config, self.trainer, self.dtype)

    def target(self) -> Layout:
        """Return the engines' layout. Raises ValueError if the sizes do not divide the model."""
        layout = SGLangLayout(family_of(self.hf_config), self.hf_config, self.engines, self.dtype)
        return QuantizedLayout(layout) if self.fp8 else layout

    def encode(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def decode(text: str) -> "RecordedLayouts":
        fields = json.loads(text)
        stage_layers = tuple(fields["trainer"].pop("stage_layers"))
        trainer = MegatronSizes(**fields["trainer"], stage_layers=stage_layers)
        engines = SGLangSizes(**fields["engines"])
        return RecordedLayouts(
            fields["hf_config"], fields["dtype"], trainer, engines, fields["fp8"]
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
                PlacedPiece(box.start, box.stop, Ranks.of(ranks), self._dtypes[name])
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
            rest = [part for piece in rest for part in _without(piece, common)]
        done = refined + [(part, ranks_of[box]) for part in rest]
    return done


def _without(box: Box, hole: Box) -> list[Box]:
    """Return `box` without its intersection with `hole`, as disjoint boxes."""
    common = box.intersect(hole)
    return [box] if common is None else subtract(box, common)
