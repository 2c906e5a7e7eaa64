"""Fills the padding of layers from that of an example, which is filled already.

layers.3, expert 0   # # # # . .   the loader sets the padding, "."
layers.4, expert 0   # # # # . .   copied from layers.3, for all experts at once
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise

from torch import Tensor

from mcore_rl.weights.layouts.repeated_layers import split_layer
from mcore_rl.weights.strides import Padding

Fill = Callable[[], object]
"""Sets some padding to its constant."""


def repeated_fills(
    example_of: Mapping[int, int], padding: Iterable[Padding], tensors: Mapping[str, Tensor]
) -> Iterator[Fill]:
    """Yield what fills the padding of layers that follow an example.

    example_of   layer -> its example
    padding      that of the examples; other padding is ignored
    tensors      name -> contiguous local tensor
    """
    padding_of: dict[int | None, list[Padding]] = defaultdict(list)
    for part in merge_padding(padding):
        padding_of[split_layer(part.tensor).layer].append(part)
    for layer, example in example_of.items():
        for part in padding_of[example]:
            name = split_layer(part.tensor).in_layer(layer)
            target = Padding(name, part.offset, part.shape, part.strides)
            yield partial(target.view(tensors).copy_, part.view(tensors))


def merge_padding(padding: Iterable[Padding]) -> Iterator[Padding]:
    """Yield the same elements in fewer parts: equal parts at equal distances become one."""
    offsets: dict[tuple[str, tuple[int, ...], tuple[int, ...]], set[int]] = defaultdict(set)
    for part in padding:
        offsets[part.tensor, part.shape, part.strides].add(part.offset)
    for (tensor, shape, strides), distinct in offsets.items():
        ordered = sorted(distinct)
        steps = {after - before for before, after in pairwise(ordered)}
        if len(steps) == 1:
            whole = (len(ordered), *shape)
            yield Padding(tensor, ordered[0], whole, (*steps, *strides))
        else:
            yield from (Padding(tensor, offset, shape, strides) for offset in ordered)
