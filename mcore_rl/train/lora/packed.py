"""Keeps weights below factors in INT4 or block FP8, as the files of a model have them.

    values, scales --this rank's slices--> kept --dequantized--> its part of W

A rank's part of a matrix may begin and end within a group or a block, whose scale it then keeps.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from mcore_rl.device import allocate_pinned_like
from mcore_rl.weights.box import Box, Shard
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.opened import list_packed, open_hf_dir
from mcore_rl.weights.hf.packed_part import PackedPart, read_part
from mcore_rl.weights.hf.packing import Packing, list_stored_names


@dataclass(frozen=True)
class KeptPart:
    """A part of a matrix, and its places in a local tensor, which may interleave it with others."""

    places: tuple[Shard, ...]
    part: PackedPart

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the part's places to what the model directory gives them, bit for bit."""
        box = self.part.box
        restored_NK = self.part.dequantize(self.places[0].view(tensors).device)
        for place in self.places:
            within = zip(place.box.start, place.box.stop, box.start, strict=True)
            rows, columns = (slice(start - first, stop - first) for start, stop, first in within)
            place.view(tensors).copy_(restored_NK[rows, columns])


def find_packed_parts(
    shards: Iterable[Shard], tensors: Mapping[str, Tensor], model: ModelFacts
) -> dict[str, list[KeptPart]]:
    """Return the parts that local tensors consist of, of those that the files have packed whole.

    shards   of HF tensors, in `tensors`
    model    the directory that the tensors were filled from; {} if its files have plain weights
    """
    if not model.is_packed:
        return {}
    file_of = open_hf_dir(model)
    names = list_packed(model.packing, file_of)
    held: dict[str, list[Shard]] = defaultdict(list)
    for shard in shards:
        if shard.tensor in tensors:
            held[shard.tensor].append(shard)
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}

        def find_stored(name: str) -> Any:
            path = file_of[name]
            if path not in opened:
                opened[path] = stack.enter_context(safe_open(path, framework="pt"))
            return opened[path].get_slice(name)

        found = {}
        for tensor, own in held.items():
            is_packed = all(shard.box.name in names for shard in own)
            if is_packed and sum(shard.box.numel for shard in own) == tensors[tensor].numel():
                parts = (_keep(*each, model.packing, find_stored) for each in _join(own))
                found[tensor] = list(parts)
        return found


def _join(shards: Sequence[Shard]) -> Iterator[tuple[Box, tuple[Shard, ...]]]:
    """Yield (box, its shards): one box for all of a matrix that lies in a local tensor, if it can.

    A box of its own for every head would need the scales of a block several times.
    """
    by_name: dict[str, list[Shard]] = defaultdict(list)
    for shard in shards:
        by_name[shard.box.name].append(shard)
    for name, own in by_name.items():
        start = tuple(map(min, zip(*(shard.box.start for shard in own), strict=True)))
        stop = tuple(map(max, zip(*(shard.box.stop for shard in own), strict=True)))
        whole = Box(name, start, stop)
        if whole.numel == sum(shard.box.numel for shard in own):
            yield whole, tuple(own)
        else:
            yield from ((shard.box, (shard,)) for shard in own)


def _keep(
    box: Box, places: tuple[Shard, ...], packing: Packing, find_stored: Callable[[str], Any]
) -> KeptPart:
    stored_values, stored_scales = map(find_stored, list_stored_names(packing, box.name))
    part = read_part(packing, stored_values, stored_scales, box)
    values, scales = (allocate_pinned_like(t).copy_(t) for t in (part.values, part.scales))
    return KeptPart(places, replace(part, values=values, scales=scales))


@torch.no_grad()
def restore_parts(packed: Mapping[str, Sequence[KeptPart]], tensors: Mapping[str, Tensor]) -> None:
    """Dequantize all parts into their places in `tensors`, one after the other."""
    for parts in packed.values():
        for kept in parts:
            kept.restore(tensors)
