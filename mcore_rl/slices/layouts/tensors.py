"""A family's table and config.json in; the HF tensors by layer, and a name's place in the table, out."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mcore_rl.slices.families.table import Family, HfConfig, HfTensor, Rule, Shape


@dataclass(frozen=True, eq=False)
class Entry:
    """A tensor of the table, without the numbers of layer and expert; compared by identity."""

    rule: Rule
    tensor: HfTensor
    shape: Shape
    dtype: str

    @property
    def suffix(self) -> str:
        """The HF name from within the layer on: "self_attn.q_proj.weight"."""
        return self.tensor.name.partition("{layer}.")[2] or self.tensor.name


@dataclass(frozen=True)
class Found:
    """A tensor by name: its entry, and the numbers in its name."""

    entry: Entry
    layer: int | None = None
    expert: int | None = None


class Tensors:
    """The tensors of one model; nothing here grows with their number, save a flag per layer."""

    def __init__(self, family: Family, hf_config: HfConfig, dtype: str) -> None:
        """`dtype`: torch name of the model's dtype, for tensors that have none of their own."""
        self.family, self.sizes = family, family.sizes(hf_config)
        self.num_heads: int = hf_config["num_attention_heads"]
        self.num_layers, self.num_experts = self.sizes["layers"], self.sizes["experts"]
        self.tied = bool(family.left_out(hf_config))
        self._is_moe = [family.is_moe_layer(hf_config, layer) for layer in range(self.num_layers)]
        left_out = family.left_out(hf_config)
        entries = [
            Entry(
                rule,
                tensor,
                tuple(self.sizes[axis] for axis in tensor.axes),
                getattr(tensor, "dtype", None) or dtype,
            )
            for rule in family.rules
            for tensor in rule.tensors
            if tensor.name not in left_out and all(self.sizes[axis] for axis in tensor.axes)
        ]
        self.model_entries = [entry for entry in entries if entry.rule.where == "model"]
        self.layer_entries = {
            is_moe: [e for e in entries if e.rule.where in ("layer", "moe" if is_moe else "dense")]
            for is_moe in (False, True)
        }
        self._by_pattern: dict[str, list[Entry]] = defaultdict(list)
        for entry in entries:
            self._by_pattern[entry.tensor.name.format(layer="#", expert="#")].append(entry)

    def find(self, name: str) -> Found | None:
        """None if the model has no tensor of this name."""
        parts, numbers = name.split("."), []
        for i, part in enumerate(parts):
            if part.isdigit():
                numbers.append(int(part))
                parts[i] = "#"
        candidates = self._by_pattern.get(".".join(parts), ())
        for entry in candidates:
            layer, expert = (*numbers, None, None)[:2]
            if layer is None:
                return Found(entry)
            if layer < self.num_layers and (expert or 0) < max(self.num_experts, 1):
                where = entry.rule.where
                if where == "layer" or self._is_moe[layer] == (where == "moe"):
                    return Found(entry, layer, expert)
        return None

    def layer_names(self, layer: int, experts: Iterable[int]) -> Iterator[str]:
        """The tensors of a layer, with those of the routed experts given."""
        for entry in self.layer_entries[self._is_moe[layer]]:
            if entry.rule.numbers_experts:
                for expert in experts:
                    yield entry.tensor.name.format(layer=layer, expert=expert)
            else:
                yield entry.tensor.name.format(layer=layer)

    def by_kind(self, layers: Iterable[int]) -> dict[bool, list[int]]:
        """The layers with experts (True) and the dense ones among `layers`, where there are any."""
        kinds: dict[bool, list[int]] = defaultdict(list)
        for layer in layers:
            kinds[self._is_moe[layer]].append(layer)
        return kinds

    def all_names(self) -> Iterator[str]:
        for entry in self.model_entries:
            yield entry.tensor.name
        for layer in range(self.num_layers):
            yield from self.layer_names(layer, range(self.num_experts))


def divide(number: int, by: int, name: str, by_name: str) -> int:
    """The quotient; ValueError names both numbers if there is a remainder."""
    if number % by:
        raise ValueError(f"{by_name} = {by} does not divide {name} = {number}")
    return number // by


def cut_evenly(shape: Shape, axis: int | None, parts: int, where: str) -> list[tuple[Shape, Shape]]:
    """(start, stop) of equal parts of a tensor along `axis`; the whole if it is None.

    ValueError says by `where` which two numbers do not divide.
    """
    if axis is None:
        return [((0,) * len(shape), shape)]
    size = divide(shape[axis], parts, f"axis {axis} of {where}", "ranks")
    return [
        (
            tuple(i * size if a == axis else 0 for a in range(len(shape))),
            tuple((i + 1) * size if a == axis else n for a, n in enumerate(shape)),
        )
        for i in range(parts)
    ]


def cut_rows(shape: Shape, rows_per_part: int, parts: int) -> list[tuple[Shape, Shape] | None]:
    """(start, stop) of parts of so many rows of a table padded at its end; None where all is padding."""
    cuts: list[tuple[Shape, Shape] | None] = []
    for i in range(parts):
        first, last = min(i * rows_per_part, shape[0]), min((i + 1) * rows_per_part, shape[0])
        rest = shape[1:]
        cuts.append(((first, *(0 for _ in rest)), (last, *rest)) if first < last else None)
    return cuts
