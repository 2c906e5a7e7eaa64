"""The part that Megatron's and SGLang's layouts share: layers on stages, routed experts in groups.

                          expert group 0     expert group 1
    stage 0, layers 0-1   experts 0-3        experts 4-7
    stage 1, layers 2-3   experts 0-3        experts 4-7

A placement is made once per (entry, stage, group); all layers and experts of a field share it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from math import prod

from mcore_rl.weights.layouts.layout import NOWHERE, HfTensors, Placement
from mcore_rl.weights.layouts.tensors import Entry, Tensors
from mcore_rl.weights.models.table import Shape


class StagedLayout(ABC):
    """A layout in which a tensor's placement follows from its entry, stage and expert group."""

    def __init__(
        self, tensors: Tensors, stage_of: Mapping[int, int], experts_per_rank: int
    ) -> None:
        """`stage_of`: layer -> pipeline stage; `experts_per_rank`: experts of an expert group."""
        self._tensors = tensors
        self._stage_of = stage_of
        self._experts_per_rank = experts_per_rank
        self._place = cache(self._make_placement)
        self._place_stacked = cache(self._stacked_placement)
        self._placements: dict[str, Placement] = {}
        """By HF name, of the tensors that were listed or asked for: a rank that links asks for each
        several times, and to take a name apart takes longer than all else that is done for it.
        """

    def placement(self, name: str) -> Placement:
        placement = self._placements.get(name)
        if placement is None:
            placement = self._find_placement(name)
            self._placements[name] = placement
        return placement

    def _find_placement(self, name: str) -> Placement:
        tensor = self._tensors.find(name)
        if tensor is None:
            return NOWHERE
        if tensor.layer is None:
            return self._place(tensor.entry, None, None)
        return self._place_in_layer(tensor.entry, tensor.layer, tensor.expert)

    def _place_in_layer(self, entry: Entry, layer: int, expert: int | None) -> Placement:
        stage = self._stage_of[layer]
        if entry.rule.stacked:
            return self._place_stacked(entry, stage)
        ep = None if expert is None else expert // self._experts_per_rank
        return self._place(entry, stage, ep)

    def names(self, rank: int) -> Iterator[str]:
        layers, ep = self._layers_and_group(rank)
        experts = range(ep * self._experts_per_rank, (ep + 1) * self._experts_per_rank)
        for entry in self._tensors.model_entries:
            if any(rank in piece.ranks for piece in self._place(entry, None, None).pieces):
                yield entry.tensor.name
        for layer in layers:
            yield from self._names_in_layer(layer, experts)

    def all_names(self) -> Iterator[str]:
        for entry in self._tensors.model_entries:
            yield entry.tensor.name
        for layer in range(self._tensors.num_layers):
            yield from self._names_in_layer(layer, range(self._tensors.num_experts))

    def hf_tensors(self) -> HfTensors:
        """Return HF name -> (shape, dtype) of every tensor, without placing any."""
        entries = self._tensors.model_entries
        described = {entry.tensor.name: (entry.shape, entry.dtype) for entry in entries}
        experts = range(self._tensors.num_experts)
        for layer in range(self._tensors.num_layers):
            for name, entry, _ in self._tensors.of_layer(layer, experts):
                described[name] = entry.shape, entry.dtype
        return described

    def _names_in_layer(self, layer: int, experts: Iterable[int]) -> Iterator[str]:
        for name, entry, expert in self._tensors.of_layer(layer, experts):
            if name not in self._placements:
                self._placements[name] = self._place_in_layer(entry, layer, expert)
            yield name

    def held(self, rank: int) -> Iterator[tuple[Entry, int]]:
        """Yield (entry, number of elements that `rank` holds of all tensors of the entry)."""
        layers, ep = self._layers_and_group(rank)
        for entry in self._tensors.model_entries:
            yield entry, _numel(self._place(entry, None, None), rank)
        for is_moe, same_kind in self._tensors.by_kind(layers).items():
            for entry in self._tensors.layer_entries[is_moe]:
                num_tensors = len(same_kind)
                if entry.rule.numbers_experts:
                    num_tensors *= self._experts_per_rank
                group = ep if entry.rule.has_expert_axis else None
                placement = self._place(entry, self._stage_of[same_kind[0]], group)
                yield entry, num_tensors * _numel(placement, rank)

    def _stacked_placement(self, entry: Entry, stage: int) -> Placement:
        """Return the placement of a tensor that stacks all experts: the pieces of all groups."""
        groups = range(self._tensors.num_experts // self._experts_per_rank)
        return Placement(
            tuple(piece for ep in groups for piece in self._place(entry, stage, ep).pieces)
        )

    def _experts_of(
        self, entry: Entry, ep: int | None, box: tuple[Shape, Shape]
    ) -> tuple[Shape, Shape]:
        """Return the part of a box (start, stop) that the expert group `ep` holds.

        Of a tensor that stacks all experts these are its own experts, otherwise the whole box.
        """
        if ep is None or not entry.rule.stacked:
            return box
        (_, *start), (_, *stop) = box
        each = self._experts_per_rank
        return (ep * each, *start), ((ep + 1) * each, *stop)

    @abstractmethod
    def _layers_and_group(self, rank: int) -> tuple[Iterable[int], int]:
        """Return the layers and the expert group of a rank."""

    @abstractmethod
    def _make_placement(self, entry: Entry, stage: int | None, ep: int | None) -> Placement:
        """Return the placement of an entry's tensors in one stage and one expert group.

        stage   None for tensors outside the layers
        ep      expert group; None for tensors other than routed experts
        """


def _numel(placement: Placement, rank: int) -> int:
    """Return the number of elements that `rank` holds."""
    numel = 0
    for piece in placement.pieces:
        if rank in piece.ranks:
            numel += prod(b - a for a, b in zip(piece.start, piece.stop, strict=True))
    return numel
