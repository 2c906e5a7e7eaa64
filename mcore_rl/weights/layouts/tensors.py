"""Lists the tensors of one model, by layer and by name, from its family's table and config.json.

    entry   model.layers.{layer}.mlp.experts.{expert}.down_proj.weight   a name in the table
    tensor  model.layers.3.mlp.experts.17.down_proj.weight               (entry, layer 3, expert 17)

It also cuts shapes into the boxes of equal parts.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

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
    """An HF tensor of the table, for all layers and experts alike; compared by identity."""

    rule: Rule
    tensor: HfTensor
    shape: Shape
    dtype: str

    @property
    def suffix(self) -> str:
        """The HF name within the layer, such as "self_attn.q_proj.weight"."""
        return self.tensor.name.partition("{layer}.")[2] or self.tensor.name


class NumberedEntry(NamedTuple):
    """One tensor of the model: its entry, and the numbers of layer and expert in its name."""

    entry: Entry
    layer: int | None = None
    expert: int | None = None


class Tensors:
    """The tensors of one model, in memory that does not grow with their number."""

    def __init__(self, family: Family, hf_config: HfConfig, dtype: str) -> None:
        """`dtype`: torch name of the model's dtype, for tensors that have none of their own."""
        self.family = family
        self.sizes = family.sizes(hf_config)
        self.num_heads: int = hf_config["num_attention_heads"]
        self.num_layers = self.sizes["layers"]
        self.num_experts = self.sizes["experts"]
        self._is_moe = [family.is_moe_layer(hf_config, layer) for layer in range(self.num_layers)]
        left_out = family.left_out(hf_config)
        self.tied = bool(left_out)
        """True if the output layer shares the embedding's weights."""
        entries = []
        for rule in family.rules:
            for tensor in rule.tensors:
                shape = tuple(self.sizes[axis] for axis in tensor.axes)
                if tensor.name in left_out or not all(shape):
                    continue
                for named in self._blocks_of(rule, tensor):
                    entries.append(Entry(rule, named, shape, tensor.dtype or dtype))
        self.model_entries = [entry for entry in entries if entry.rule.where in OUTSIDE_LAYERS]
        """The entries outside the layers; each module of a vision tower has its own."""
        self.layer_entries = {
            False: [entry for entry in entries if entry.rule.where in ("layer", "dense")],
            True: [entry for entry in entries if entry.rule.where in ("layer", "moe")],
        }
        """The entries of a dense layer (key False) and of a layer with experts (key True)."""
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
            where = entry.rule.where
            if where == "layer" or self._is_moe[layer] == (where == "moe"):
                return NumberedEntry(entry, layer, expert)
        return None

    def _blocks_of(self, rule: Rule, tensor: HfTensor) -> Iterator[HfTensor]:
        """Yield the tensor itself, or that of every numbered module of a vision tower."""
        if rule.where not in NUMBERED_BY:
            yield tensor
            return
        for number in range(self.sizes[NUMBERED_BY[rule.where]]):
            yield replace(tensor, name=tensor.name.format(layer=number))

    def of_layer(
        self, layer: int, experts: Iterable[int]
    ) -> Iterator[tuple[str, Entry, int | None]]:
        """Yield (HF name, entry, expert) of a layer's tensors; the routed experts are `experts`."""
        for entry in self.layer_entries[self._is_moe[layer]]:
            if entry.rule.numbers_experts:
                before, after = entry.tensor.name.split("{expert}")
                before, after = before.format(layer=layer), after.format(layer=layer)
                for expert in experts:
                    yield f"{before}{expert}{after}", entry, expert
            else:
                yield entry.tensor.name.format(layer=layer), entry, None

    def by_kind(self, layers: Iterable[int]) -> dict[bool, list[int]]:
        """Return the `layers` that have experts (key True) and those that are dense (key False)."""
        kinds: dict[bool, list[int]] = defaultdict(list)
        for layer in layers:
            kinds[self._is_moe[layer]].append(layer)
        return kinds


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
