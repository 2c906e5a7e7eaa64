"""Keeps weights below factors in INT4, as the files of a model have them.

    X.weight_packed, X.weight_scale --this rank's slices--> kept --dequantized--> its part of W

A rank's part of a matrix is kept so if it begins and ends where groups of 32 columns do.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import Tensor

from mcore_rl.device import allocate_pinned_like
from mcore_rl.weights.box import Shard
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.files import open_hf_dir
from mcore_rl.weights.hf.int4 import GROUP, PER_WORD, list_part_names
from mcore_rl.weights.hf.int4_groups import dequantize_groups


@dataclass(frozen=True)
class PackedPart:
    """A part of a matrix in INT4.

    place       of the part, in a local tensor
    packed_NW   int32 words, N rows of 8 values each
    scales_NG   scales of groups of 32 values
    """

    place: Shard
    packed_NW: Tensor
    scales_NG: Tensor

    @property
    def nbytes(self) -> int:
        return self.packed_NW.nbytes + self.scales_NG.nbytes

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the part's place to what the model directory gives it, bit for bit."""
        view_NK = self.place.view(tensors)
        kept = self.packed_NW, self.scales_NG
        view_NK.copy_(dequantize_groups(*(p.to(view_NK.device, non_blocking=True) for p in kept)))


def find_packed(
    shards: Iterable[Shard], tensors: Mapping[str, Tensor], model: ModelFacts
) -> dict[str, list[PackedPart]]:
    """Return the parts that local tensors consist of, of those that can be kept in INT4 as a whole.

    shards   of HF tensors, in `tensors`
    model    the directory that the tensors were filled from; {} unless its files are INT4
    """
    if not model.int4:
        return {}
    file_of = open_hf_dir(model)
    held: dict[str, list[Shard]] = defaultdict(list)
    for shard in shards:
        if shard.tensor in tensors:
            held[shard.tensor].append(shard)
    return {
        name: [_read(shard, file_of) for shard in own]
        for name, own in held.items()
        if _is_whole(own, tensors[name], file_of)
    }


def _is_whole(own: Sequence[Shard], tensor: Tensor, file_of: Mapping[str, object]) -> bool:
    """Return whether shards of INT4 matrices, cut between groups, make up a local tensor."""
    are_int4 = all(list_part_names(shard.box.name)[0] in file_of for shard in own)
    if not are_int4 or sum(shard.box.numel for shard in own) != tensor.numel():
        return False
    ends = [shard.box.start[1] for shard in own] + [shard.box.stop[1] for shard in own]
    return all(end % GROUP == 0 for end in ends)


def _read(shard: Shard, file_of: Mapping[str, object]) -> PackedPart:
    box = shard.box
    words, scales, _ = list_part_names(box.name)
    rows = slice(box.start[0], box.stop[0])
    first, last = box.start[1] // GROUP, box.stop[1] // GROUP
    per_group = GROUP // PER_WORD
    columns = {words: slice(first * per_group, last * per_group), scales: slice(first, last)}
    read = []
    for name, own in columns.items():
        with safe_open(file_of[name], framework="pt") as file:  # type: ignore[arg-type]
            part = file.get_slice(name)[rows, own]
        kept = allocate_pinned_like(part)
        read.append(kept.copy_(part))
    return PackedPart(shard, *read)


@torch.no_grad()
def restore_parts(
    packed: Mapping[str, Sequence[PackedPart]], tensors: Mapping[str, Tensor]
) -> None:
    """Dequantize all parts into their places in `tensors`, one after the other."""
    for parts in packed.values():
        for part in parts:
            part.restore(tensors)
