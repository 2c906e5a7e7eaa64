"""What the layouts of both sides share: layers dealt out to stages, routed experts to groups of ranks."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from math import prod

from mcore_rl.slices.families.table import Shape
from mcore_rl.slices.layouts.layout import NOWHERE, Placement
from mcore_rl.slices.layouts.tensors import Entry, Tensors


class StagedLayout(ABC):
    """A layout in which the placement of a tensor follows from its entry, its stage and its expert group."""

    def __init__(
        self, tensors: Tensors, stage_of: Mapping[int, int], experts_per_rank: int
    ) -> None:
        """`stage_of`: layer -> pipeline stage; `experts_per_rank`: routed experts of an expert group."""
        self._tensors, self._stage_of, self._experts_per_rank = tensors, stage_of, experts_per_rank
        self._place, self._place_all = cache(self._make_placement), cache(self._join_placements)

    def placement(self, name: str) -> Placement:
        found = self._tensors.find(name)
        if found is None:
            return NOWHERE
        if found.layer is None:
            return self._place(found.entry, None, None)
        stage = self._stage_of[found.layer]
        if found.entry.rule.stacked:
            return self._place_all(found.entry, stage)
        ep = None if found.expert is None else found.expert // self._experts_per_rank
        return self._place(found.entry, stage, ep)

    def names(self, rank: int) -> Iterator[str]:
        layers, ep = self._seat(rank)
        experts = range(ep * self._experts_per_rank, (ep + 1) * self._experts_per_rank)
        for entry in self._tensors.model_entries:
            if any(rank in piece.ranks for piece in self._place(entry, None, None).pieces):
                yield entry.tensor.name
        for layer in layers:
            yield from self._tensors.layer_names(layer, experts)

    def all_names(self) -> Iterator[str]:
        return self._tensors.all_names()

    def held(self, rank: int) -> Iterator[tuple[Entry, int]]:
        """How many elements `rank` holds of all tensors of each entry of the table, in closed form."""
        layers, ep = self._seat(rank)
        for entry in self._tensors.model_entries:
            yield entry, _numel(self._place(entry, None, None), rank)
        for is_moe, of_kind in self._tensors.by_kind(layers).items():
            for entry in self._tensors.layer_entries[is_moe]:
                count = len(of_kind) * (self._experts_per_rank if entry.rule.numbers_experts else 1)
                group = ep if entry.rule.has_expert_axis else None
                place = self._place(entry, self._stage_of[of_kind[0]], group)
                yield entry, count * _numel(place, rank)

    def _join_placements(self, entry: Entry, stage: int) -> Placement:
        """Of a tensor that holds all experts."""
        groups = range(self._tensors.num_experts // self._experts_per_rank)
        return Placement(
            tuple(piece for ep in groups for piece in self._place(entry, stage, ep).pieces)
        )

    def _experts_of(
        self, entry: Entry, ep: int | None, box: tuple[Shape, Shape]
    ) -> tuple[Shape, Shape]:
        """What of a box the expert group `ep` holds: of a tensor that holds all experts, its own."""
        if ep is None or not entry.rule.stacked:
            return box
        (_, *start), (_, *stop) = box
        each = self._experts_per_rank
        return (ep * each, *start), ((ep + 1) * each, *stop)

    @abstractmethod
    def _seat(self, rank: int) -> tuple[Iterable[int], int]:
        """The layers and the expert group of a rank."""

    @abstractmethod
    def _make_placement(self, entry: Entry, stage: int | None, ep: int | None) -> Placement:
        """`stage`: None for tensors outside the layers; `ep`: None for all but routed experts, of which it
        says whose experts are meant where one tensor holds all.
        """


def _numel(placement: Placement, rank: int) -> int:
    pieces = (piece for piece in placement.pieces if rank in piece.ranks)
    return sum(
        prod(b - a for a, b in zip(piece.start, piece.stop, strict=True)) for piece in pieces
    )
