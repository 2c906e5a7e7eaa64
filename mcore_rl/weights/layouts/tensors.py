"""Lists the tensors of one model, by layer and by name, from its family's table and config.json.

    entry   model.layers.{layer}.mlp.experts.{expert}.down_proj.weight   a name in the table
    tensor  model.layers.3.mlp.experts.17.down_proj.weight               (entry, layer 3, expert 17)

It also has what Megatron's and SGLang's layouts share: equal parts of shapes, layers on stages, and
routed experts in groups.

                          expert group 0     expert group 1
    stage 0, layers 0-1   experts 0-3        experts 4-7
    stage 1, layers 2-3   experts 0-3        experts 4-7

A placement is made once per (entry, stage, group); all layers and experts of a field share it.
"""

import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import NamedTuple

from mcore_rl.weights.layouts.layout import NOWHERE, HfTensors, Placement
from mcore_rl.weights.models.table import (
    NUMBERED_BY,
    Family,
    HfConfig,
    HfTensor,
    Rule,
    Shape,
)

_NUMBER = re.compile(r"\.(\d+)(?![^.])")
"""A part of a name, behind a dot and up to the next, that is a number."""

OUTSIDE_LAYERS = ("model", *NUMBERED_BY)
"""The values of Rule.where of tensors that belong to no layer of the language model."""


@dataclass(frozen=True, eq=False)
class Entry:
    """An HF tensor of the table, for all layers and experts alike; compared by identity.

    rule     the first rule that has rows of the tensor
    others   further rules that have other sections of the tensor
    expert   number of the expert whose tensor it is, in a module outside the layers
    listed   name in the table, if `tensor` has the number of such a module in its name
    """

    rule: Rule
    tensor: HfTensor
    shape: Shape
    dtype: str
    others: tuple[Rule, ...] = ()
    expert: int | None = None
    listed: str | None = None

    @property
    def suffix(self) -> str:
        """The HF name within the layer, such as "self_attn.q_proj.weight"."""
        name = self.tensor.name
        if self.listed is not None and self.rule.where == "mtp":
            name = self.listed
        return name.partition("{layer}.")[2] or name


class NumberedEntry(NamedTuple):
    """One tensor of the model: its entry, and the numbers of layer and expert in its name."""

    entry: Entry
    layer: int | None = None
    expert: int | None = None


LayerKind = frozenset[str]
"""The values of Rule.where of a layer's tensors, besides "layer"; see Family.list_kinds."""


def _has(kind: LayerKind, rule: Rule) -> bool:
    """Return whether a layer of this kind has the tensor of a rule."""
    return rule.where == "layer" or rule.where in kind


class Tensors:
    """The tensors of one model, in memory that does not grow with their number."""

    def __init__(self, family: Family, hf_config: HfConfig, dtype: str) -> None:
        """`dtype`: torch name of the model's dtype, for tensors that have none of their own."""
        self.family = family
        self.sizes = family.sizes(hf_config)
        self.num_heads: int = hf_config["num_attention_heads"]
        self.num_layers = self.sizes["layers"]
        self.num_experts = self.sizes["experts"]
        self._kinds = [family.list_kinds(hf_config, layer) for layer in range(self.num_layers)]
        left_out = family.find_left_out(hf_config)
        self.tied = bool(left_out)
        """True if the output layer shares the embedding's weights."""
        entries: list[Entry] = []
        for (_, rules), tensor in _list_places(family).items():
            shape = tuple(self.sizes[axis] for axis in tensor.axes)
            if tensor.name in left_out or not all(shape):
                continue
            rule, *others = rules
            described = (shape, tensor.dtype or dtype, tuple(others))
            entries += [
                Entry(rule, named, *described, expert, tensor.name)
                for named, expert in self._modules_of(rule, tensor)
            ]
        self.model_entries = [entry for entry in entries if entry.rule.where in OUTSIDE_LAYERS]
        """The entries outside the layers; each numbered module there has its own."""
        self.layer_entries = {
            kind: [entry for entry in entries if _has(kind, entry.rule)]
            for kind in set(self._kinds)
        }
        """The entries of a layer of each kind."""
        self._by_pattern: dict[tuple[str, ...], list[Entry]] = defaultdict(list)
        """Parts of a name around its numbers -> entries."""
        self._by_name = {entry.tensor.name: entry for entry in self.model_entries}
        for entry in entries:
            if entry.rule.where not in OUTSIDE_LAYERS:
                pattern = _NUMBER.split(entry.tensor.name.format(layer=0, expert=0))[::2]
                self._by_pattern[tuple(pattern)].append(entry)

    def find(self, name: str) -> NumberedEntry | None:
        """Return the tensor of this name, or None if the model has none."""
        if name in self._by_name:
            return NumberedEntry(self._by_name[name])
        parts = _NUMBER.split(name)
        numbers = map(int, parts[1::2])
        layer, expert = (*numbers, None, None)[:2]
        candidates = self._by_pattern.get(tuple(parts[::2]), ())
        for entry in candidates:
            if (
                layer is None
                or layer >= self.num_layers
                or (expert or 0) >= max(self.num_experts, 1)
            ):
                continue
            if _has(self._kinds[layer], entry.rule):
                return NumberedEntry(entry, layer, expert)
        return None

    def _modules_of(self, rule: Rule, tensor: HfTensor) -> Iterator[tuple[HfTensor, int | None]]:
        """Yield the tensor itself, or that of every numbered module, with the expert if it is of
        one.
        """
        if rule.where not in NUMBERED_BY:
            yield tensor, None
            return
        experts = range(self.num_experts) if rule.numbers_experts else (None,)
        for number in range(self.sizes[NUMBERED_BY[rule.where]]):
            in_hf = rule.find_hf_number(number, self.sizes)
            for expert in experts:
                yield replace(tensor, name=tensor.name.format(layer=in_hf, expert=expert)), expert

    def list_layer_tensors(
        self, layer: int, experts: Iterable[int]
    ) -> Iterator[tuple[str, Entry, int | None]]:
        """Yield (HF name, entry, expert) of a layer's tensors; the routed experts are `experts`."""
        for entry in self.layer_entries[self._kinds[layer]]:
            if entry.rule.numbers_experts:
                before, after = entry.tensor.name.split("{expert}")
                before, after = before.format(layer=layer), after.format(layer=layer)
                for expert in experts:
                    yield f"{before}{expert}{after}", entry, expert
            else:
                yield entry.tensor.name.format(layer=layer), entry, None

    def by_kind(self, layers: Iterable[int]) -> dict[LayerKind, list[int]]:
        """Return those of `layers` that are of each kind."""
        kinds: dict[LayerKind, list[int]] = defaultdict(list)
        for layer in layers:
            kinds[self._kinds[layer]].append(layer)
        return kinds


def _list_places(family: Family) -> dict[tuple[str, tuple[Rule, ...]], HfTensor]:
    """Return (HF name, rules that have rows of it in the same layers) -> the tensor."""
    rules: dict[tuple[str, str], list[Rule]] = defaultdict(list)
    tensors: dict[tuple[str, str], HfTensor] = {}
    for rule in family.rules:
        for tensor in rule.tensors:
            place = tensor.name, rule.where
            tensors.setdefault(place, tensor)
            if rule not in rules[place]:
                rules[place].append(rule)
    return {(name, tuple(rules[name, where])): t for (name, where), t in tensors.items()}


def divide(number: int, by: int, name: str, by_name: str) -> int:
    """Return the quotient. Raises ValueError naming both numbers if there is a remainder."""
    if number % by:
        raise ValueError(f"{by_name} = {by} does not divide {name} = {number}")
    return number // by


def cut_evenly(shape: Shape, axis: int | None, parts: int, where: str) -> list[tuple[Shape, Shape]]:
    """Return the boxes (start, stop) of equal parts of a tensor along `axis`.

    With axis None the only part is the whole tensor. Raises ValueError naming the two numbers if
    the parts are not equal; `where` names the tensor in it.
    """
    if axis is None:
        return [((0,) * len(shape), shape)]
    size = divide(shape[axis], parts, f"axis {axis} of {where}", "ranks")
    boxes = []
    for i in range(parts):
        start = [0] * len(shape)
        stop = list(shape)
        start[axis] = i * size
        stop[axis] = (i + 1) * size
        boxes.append((tuple(start), tuple(stop)))
    return boxes


def cut_halves(
    shape: Shape, axis: int | None, parts: int, where: str
) -> list[list[tuple[Shape, Shape]]]:
    """Return the two boxes (start, stop) of each part of a tensor whose halves are cut alike.

    With axis None the only part is the whole tensor. Raises ValueError as `cut_evenly` does.
    """
    if axis is None:
        return [cut_evenly(shape, None, 1, where)]
    pieces = cut_evenly(shape, axis, 2 * parts, where)
    return [pieces[part::parts] for part in range(parts)]


def cut_padded(
    shape: Shape, axis: int, multiple: int, parts: int, where: str
) -> list[tuple[Shape, Shape] | None]:
    """Return the boxes (start, stop) of equal parts along `axis`, padded to a multiple at its end.

    None stands for a part that is all padding. Raises ValueError naming the two numbers if the
    parts of the padded axis are not equal; `where` names the tensor in it.
    """
    padded = -(-shape[axis] // multiple) * multiple
    size = divide(padded, parts, f"padded axis {axis} of {where}", "ranks")
    cuts: list[tuple[Shape, Shape] | None] = []
    for i in range(parts):
        first, last = (min(at * size, shape[axis]) for at in (i, i + 1))
        start = (*(0 for _ in shape[:axis]), first, *(0 for _ in shape[axis + 1 :]))
        stop = (*shape[:axis], last, *shape[axis + 1 :])
        cuts.append((start, stop) if first < last else None)
    return cuts


def cut_rows(shape: Shape, rows_per_part: int, parts: int) -> list[tuple[Shape, Shape] | None]:
    """Return the boxes (start, stop) of parts of a table that is padded at its end.

    Each part has `rows_per_part` rows; None stands for a part that is all padding.
    """
    cuts: list[tuple[Shape, Shape] | None] = []
    for i in range(parts):
        first = min(i * rows_per_part, shape[0])
        last = min((i + 1) * rows_per_part, shape[0])
        rest = shape[1:]
        if first < last:
            cuts.append(((first, *(0 for _ in rest)), (last, *rest)))
        else:
            cuts.append(None)
    return cuts


def cut_blocks(
    entry: Entry, sizes: Mapping[str, int], parts: int
) -> list[list[tuple[Shape, Shape]]]:
    """Return the boxes (start, stop) of each part if Megatron's tensors are cut into equal runs.

    A Megatron tensor is made of blocks of rows (q k v | q k v), so a run holds rows of `entry` from
    one or several blocks, or none. Rows of several Megatron tensors, each of which is cut for
    itself, may follow one another in the HF tensor. Raises ValueError naming the two numbers if
    the runs are not equal.
    """
    spans: list[list[tuple[int, int]]] = [[] for _ in range(parts)]
    for rule in (entry.rule, *entry.others):
        rows = divide(rule.count_rows(sizes), parts, f"rows of {rule.key}", "tp")
        for block in rule.list_blocks(sizes):
            if block.tensor is None or block.tensor.name != (entry.listed or entry.tensor.name):
                continue
            stop = block.start + block.num_rows
            shift = block.hf_start - block.start
            for part in range(block.start // rows, (stop - 1) // rows + 1):
                first = max(block.start, part * rows)
                last = min(stop, (part + 1) * rows)
                spans[part].append((first + shift, last + shift))
    rest = entry.shape[1:]
    start = tuple(0 for _ in rest)
    return [[((a, *start), (b, *rest)) for a, b in _join(own)] for own in spans]


def _join(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return spans [first, last) in order, with those that touch made one."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if joined and joined[-1][1] == first:
            joined[-1] = joined[-1][0], last
        else:
            joined.append((first, last))
    return joined


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
        self._place_stacked = cache(self._find_stacked_placement)
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
            return self._place_outside(tensor.entry)
        return self._place_in_layer(tensor.entry, tensor.layer, tensor.expert)

    def _place_outside(self, entry: Entry) -> Placement:
        """Return the placement of a tensor outside the layers."""
        group = None if entry.expert is None else entry.expert // self._experts_per_rank
        return self._place(entry, None, group)

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
            if any(rank in piece.ranks for piece in self._place_outside(entry).pieces):
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
            for name, entry, _ in self._tensors.list_layer_tensors(layer, experts):
                described[name] = entry.shape, entry.dtype
        return described

    def _names_in_layer(self, layer: int, experts: Iterable[int]) -> Iterator[str]:
        for name, entry, expert in self._tensors.list_layer_tensors(layer, experts):
            if name not in self._placements:
                self._placements[name] = self._place_in_layer(entry, layer, expert)
            yield name

    def count_held(self, rank: int) -> Iterator[tuple[Entry, int]]:
        """Yield (entry, number of elements that `rank` holds of all tensors of the entry)."""
        for entry, num_tensors, placement in self.list_held(rank):
            yield entry, num_tensors * _count_elements(placement, rank)

    def list_held(self, rank: int) -> Iterator[tuple[Entry, int, Placement]]:
        """Yield (entry, its tensors on `rank` or, outside the layers, 1, placement of each)."""
        layers, ep = self._layers_and_group(rank)
        for entry in self._tensors.model_entries:
            yield entry, 1, self._place_outside(entry)
        for kind, same_kind in self._tensors.by_kind(layers).items():
            for entry in self._tensors.layer_entries[kind]:
                num_tensors = len(same_kind)
                if entry.rule.numbers_experts:
                    num_tensors *= self._experts_per_rank
                group = ep if entry.rule.has_expert_axis else None
                placement = self._place(entry, self._stage_of[same_kind[0]], group)
                yield entry, num_tensors, placement

    def _find_stacked_placement(self, entry: Entry, stage: int) -> Placement:
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


def _count_elements(placement: Placement, rank: int) -> int:
    """Return the number of elements that `rank` holds."""
    numel = 0
    for piece in placement.pieces:
        if rank in piece.ranks:
            numel += prod(b - a for a, b in zip(piece.start, piece.stop, strict=True))
    return numel
