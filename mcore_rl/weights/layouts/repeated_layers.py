"""Picks one example of layers that are alike, to be traced in full, and samples of the others.

    layers.3  experts.0 to experts.255           traced: the example
    layers.4  experts.0, .91, .202 and .255      traced, and compared with the example
              all other experts                  as in the example, with 4 for 3 in their names

A tensor's layer is the first number in its name. Layers are alike if their HF tensors and their
local tensors have equal names but for this number, equal shapes and equal dtypes. If a loader
treats them differently nevertheless, a sample shows it, and all tensors are to be traced.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from mcore_rl.weights.box import Box, Padding, Shard

MIN_ALIKE = 3
"""Layers from which on an example pays."""
_DRAWS = (7919, 104729)
"""Primes: two experts drawn per layer, others in each layer."""
_NUMBER = re.compile(r"\.(\d+)\.")

Pattern = tuple[str, str]
"""(what precedes an expert's number, what follows it)"""


class LayerName(NamedTuple):
    """A tensor's name in three parts; `layer` is None if it has no number between dots."""

    before: str
    layer: int | None
    after: str

    def in_layer(self, layer: int) -> str:
        """Return the name with another layer's number."""
        return f"{self.before}.{layer}.{self.after}"

    @property
    def without_layer(self) -> str:
        """The name without its number, which tensors of layers that are alike have in common."""
        return f"{self.before}.{self.after}"


def split_layer(name: str) -> LayerName:
    """Return the parts of `name` around its first number: "layers", 3, "mlp.gate.weight"."""
    before, *rest = _NUMBER.split(name, maxsplit=1)
    if not rest:
        return LayerName(name, None, "")
    number, after = rest
    return LayerName(before, int(number), after)


class RepeatedLayers:
    """The layers of a model that are alike, by the names, shapes and dtypes of their tensors."""

    def __init__(
        self,
        hf_tensors: Mapping[str, tuple[tuple[int, ...], object]],
        local_tensors: Mapping[str, Tensor],
    ) -> None:
        """`hf_tensors`: HF name -> (shape, dtype); `local_tensors`: this rank's parameters."""
        self._hf_names: dict[int | None, list[str]] = defaultdict(list)
        features: dict[int | None, list[object]] = defaultdict(list)
        for name, described in hf_tensors.items():
            before, layer, after = split_layer(name)
            self._hf_names[layer].append(name)
            features[layer].append((before, after, described))
        for name, tensor in local_tensors.items():
            before, layer, after = split_layer(name)
            features[layer].append((before, after, tensor.shape, tensor.dtype, "local"))
        alike: dict[frozenset[object], list[int]] = defaultdict(list)
        for layer, own in features.items():
            if layer is not None:
                alike[frozenset(own)].append(layer)
        self.example_of = {
            layer: layers[0]
            for layers in alike.values()
            for layer in layers[1:]
            if len(layers) >= MIN_ALIKE
        }
        """Layer -> the layer that is traced in full for it."""
        self._repeated = {*self.example_of, *self.example_of.values()}

    def to_trace(self, shards: Sequence[Shard]) -> Iterator[str]:
        """Yield the HF names to trace: first all examples, then the samples of other layers.

        `shards` is the list that the trace of these names fills: the experts of a sample are drawn
        from those that this rank was seen to hold.
        """
        for layer, names in self._hf_names.items():
            if layer not in self.example_of:
                yield from names
        held: dict[int | None, set[str]] = defaultdict(set)
        for shard in shards:
            held[split_layer(shard.box.name).layer].add(shard.box.name)
        samples = {
            example: _Sample(self._hf_names[example], held[example])
            for example in set(self.example_of.values())
        }
        for layer, example in self.example_of.items():
            yield from samples[example].names_in(layer)

    def follows(self, name: str) -> bool:
        """Return whether a tensor, HF or local, is in a layer that follows an example."""
        return split_layer(name).layer in self.example_of

    def example_name(self, name: str) -> str:
        """Return the name of the same tensor in the layer that is traced in full for it."""
        parts = split_layer(name)
        if parts.layer is None or parts.layer not in self.example_of:
            return name
        return parts.in_layer(self.example_of[parts.layer])

    def complete(
        self, shards: Iterable[Shard], traced: Iterable[str], padding: Iterable[Padding]
    ) -> list[Shard] | None:
        """Return the shards of all layers, or None if all tensors are to be traced.

        shards    what the trace recorded
        traced    the HF names that the loader was given
        padding   what the loader sets to constants

        It is None if a sample differs from its example, or if weights cross from one layer to
        another.
        """
        shards_of: dict[int | None, list[Shard]] = defaultdict(list)
        for shard in shards:
            layer = split_layer(shard.box.name).layer
            target = split_layer(shard.tensor).layer
            if layer != target and not self._repeated.isdisjoint((layer, target)):
                return None
            shards_of[layer].append(shard)
        padding_of: dict[int | None, list[Padding]] = defaultdict(list)
        for part in padding:
            padding_of[split_layer(part.tensor).layer].append(part)
        names_of: dict[int | None, set[str]] = defaultdict(set)
        for name in traced:
            names_of[split_layer(name).layer].add(name)
        examples = {
            layer: _Example(shards_of[layer], padding_of[layer])
            for layer in set(self.example_of.values())
        }
        whole = {layer: own for layer, own in shards_of.items() if layer not in self.example_of}
        for layer, number in self.example_of.items():
            example = examples[number]
            derived = example.shards_in(layer)
            if not (
                example.agrees(shards_of[layer], derived, names_of[layer])
                and example.agrees_padding(padding_of[layer])
            ):
                return None
            whole[layer] = derived
        return [shard for own in whole.values() for shard in own]


class _Example:
    """A traced layer, whose shards are repeated in other layers and compared with them."""

    def __init__(self, shards: Sequence[Shard], padding: Iterable[Padding]) -> None:
        self._shards = [
            (split_layer(shard.box.name), split_layer(shard.tensor), shard) for shard in shards
        ]
        self._kinds = set(map(_find_kind, shards))
        self._padding = set(map(_strip_layer, padding))
        self._padded = {tensor for tensor, _ in self._padding}

    def shards_in(self, layer: int) -> list[Shard]:
        """Return the shards with another layer in the names of both tensors."""
        return [
            Shard(
                Box(hf.in_layer(layer), shard.box.start, shard.box.stop),
                local.in_layer(layer),
                shard.offset,
                shard.strides,
                shard.dtype,
            )
            for hf, local, shard in self._shards
        ]

    def agrees(self, traced: Sequence[Shard], derived: Iterable[Shard], names: set[str]) -> bool:
        """Return whether a layer's sample shows what was derived for it, and some of each kind.

        `names` are the HF names of the layer that were traced.
        """
        expected = {shard for shard in derived if shard.box.name in names}
        return expected == set(traced) and self._kinds == set(map(_find_kind, traced))

    def agrees_padding(self, padding: Iterable[Padding]) -> bool:
        """Return whether a layer's sample shows padding of the example, in the same tensors."""
        shown = set(map(_strip_layer, padding))
        return shown <= self._padding and self._padded == {tensor for tensor, _ in shown}


class _Sample:
    """The names to trace of the layers that follow an example, whose names are alike.

    These are the names that have no number of an expert, and those of the first and the last of the
    experts that the rank holds, and of those that it does not, and of some that it holds between.
    """

    def __init__(self, names: Iterable[str], held: set[str]) -> None:
        """`names` are the HF names of the example, of which the rank holds `held`."""
        self._others: list[LayerName] = []
        self._experts: dict[tuple[Pattern, bool], list[LayerName]] = defaultdict(list)
        for name in names:
            parts = split_layer(name)
            pattern = _make_pattern(parts.without_layer)
            if pattern is None:
                self._others.append(parts)
            else:
                self._experts[pattern, name in held].append(parts)

    def names_in(self, layer: int) -> Iterator[str]:
        """Yield the names to trace of a layer."""
        for name in self._others:
            yield name.in_layer(layer)
        for (_, is_held), alike in self._experts.items():
            drawn = [layer * prime % len(alike) for prime in _DRAWS] if is_held else []
            for number in dict.fromkeys((0, *drawn, len(alike) - 1)):
                yield alike[number].in_layer(layer)


def _make_pattern(name: str) -> Pattern | None:
    """Return what surrounds the first number of a name, or None if it has none."""
    before, number, after = split_layer(name)
    return None if number is None else (before, after)


def _strip_layer(part: Padding) -> tuple[str, tuple[object, ...]]:
    """Return (local tensor without its layer, where the padding lies in it)."""
    return split_layer(part.tensor).without_layer, (part.offset, part.shape, part.strides)


def _find_kind(shard: Shard) -> Pattern | str:
    """Return what a layer's HF name shares with the names of all experts of its kind."""
    name = split_layer(shard.box.name).without_layer
    return _make_pattern(name) or name
