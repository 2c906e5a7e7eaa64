"""Says how files have matrices in few bits, and what of them a part of a matrix needs.

int4   X.weight_packed int32 [N, K / 8],   X.weight_scale [N, K / 32]                 (int4.py)
fp8    X.weight float8_e4m3fn [N, K],      X.weight_scale_inv [N / 128, K / 128]       (fp8.py)

    |<- 128 ->|<- 128 ->|
    +---------+---------+     A part may begin and end anywhere: it needs the scales of the
    |    +----|---+     |     blocks that it touches, here of four, and its own values; of
    +----|----|---|-----+     INT4 the words of the groups that it touches.
    |    +----|---+     |
    +---------+---------+
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mcore_rl.weights.box import Box, itemsize
from mcore_rl.weights.hf import fp8, int4

Packing = Literal["plain", "int4", "fp8"]
Ranges = tuple[slice, slice]
"""Rows and columns of a stored tensor."""


@dataclass(frozen=True)
class StoredPart:
    """Where the values and scales of a part of a matrix are in the two stored tensors."""

    values: Ranges
    scales: Ranges


def find_packing(config: Mapping[str, Any]) -> Packing:
    """Return how the model's files have its matrices, by its config.json.

    "plain" for kinds of quantization that are not read, too.
    """
    if int4.is_int4(config):
        return "int4"
    return "fp8" if fp8.is_block_fp8(int4.find_quantization(config)) else "plain"


def list_stored_names(packing: Packing, name: str) -> tuple[str, str]:
    """Return the HF names of the values and of the scales of the packed matrix `name`."""
    assert packing != "plain", name
    if packing == "int4":
        return int4.list_part_names(name)[:2]
    return name, fp8.make_scale_name(name)


def find_stored(packing: Packing, box: Box) -> StoredPart:
    """Return what the part `box` of a packed matrix needs of the stored tensors."""
    assert packing != "plain", box
    rows, columns = map(slice, box.start, box.stop)
    if packing == "int4":
        groups = _touch(columns, int4.GROUP)
        per_group = int4.GROUP // int4.PER_WORD
        words = slice(groups.start * per_group, groups.stop * per_group)
        return StoredPart((rows, words), (rows, groups))
    return StoredPart((rows, columns), (_touch(rows, fp8.BLOCK), _touch(columns, fp8.BLOCK)))


def _touch(ends: slice, size: int) -> slice:
    """Return the range of blocks of `size` elements that a range of elements touches."""
    return slice(ends.start // size, -(-ends.stop // size))


def count_packed_bytes(packing: Packing, box: Box) -> int:
    """Return the bytes of a part's values and scales.

    Scales of INT4 count as bfloat16, as in published files; scales of FP8 as float32, as in memory.
    """
    stored = find_stored(packing, box)
    kinds = {"int4": (int4.PACKED_DTYPE, int4.SCALE_DTYPE), "fp8": (fp8.FP8, fp8.SCALE_DTYPE)}
    pairs = zip((stored.values, stored.scales), kinds[packing], strict=True)
    return sum(_count(ranges) * itemsize(dtype) for ranges, dtype in pairs)


def _count(ranges: Ranges) -> int:
    rows, columns = (ends.stop - ends.start for ends in ranges)
    return rows * columns
