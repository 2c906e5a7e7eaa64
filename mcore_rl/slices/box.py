"""Boxes: which part of which HuggingFace tensor a piece of local memory holds.

     HF tensor "q_proj.weight" [8, 4]           tensor "qkv.weight" [6, 4] of one rank
     rows 0-3   . . . .                         rows 0-1  # # # #   Shard(box, offset=0, strides=(4, 1))
     rows 4-5   # # # #  <- box                 rows 2-3  k k k k
     rows 6-7   . . . .                         rows 4-5  v v v v

Training layout, engine layout and checkpoint files are all lists of shards in the coordinates of the HF
tensors, so loading, syncing, exporting and verifying intersect two such lists and copy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from operator import lt
from typing import TYPE_CHECKING

from mcore_rl.slices.hf.dtypes import ITEMSIZE

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Box:
    """Elements [start, stop) on each axis of the HF tensor `name`."""

    name: str
    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop) or not all(map(lt, self.start, self.stop)):
            raise ValueError(
                f"box of {self.name}: start {self.start} and stop {self.stop} enclose nothing"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def intersect(self, other: "Box") -> "Box | None":
        """The elements in both boxes; None if there are none."""
        if self.name != other.name:
            return None
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if not all(map(lt, start, stop)):
            return None
        return Box(self.name, start, stop)


def subtract(box: Box, hole: Box) -> list[Box]:
    """`box` without `hole`, which must lie inside it, as disjoint boxes."""
    rest = []
    start, stop = list(box.start), list(box.stop)
    for axis in range(len(start)):
        if start[axis] < hole.start[axis]:
            rest.append(
                Box(box.name, tuple(start), (*stop[:axis], hole.start[axis], *stop[axis + 1 :]))
            )
        if hole.stop[axis] < stop[axis]:
            rest.append(
                Box(box.name, (*start[:axis], hole.stop[axis], *start[axis + 1 :]), tuple(stop))
            )
        start[axis], stop[axis] = hole.start[axis], hole.stop[axis]
    return rest


def itemsize(dtype: str) -> int:
    """Bytes per element of a torch dtype given by name."""
    return ITEMSIZE[dtype]


@dataclass(frozen=True)
class Shard:
    """`box` lies in local tensor `tensor` from element `offset` on, with one stride (elements) per axis."""

    box: Box
    tensor: str
    offset: int
    strides: tuple[int, ...]
    dtype: str
    """torch name of the local tensor's dtype, such as "bfloat16"."""

    @property
    def num_bytes(self) -> int:
        return self.box.numel * itemsize(self.dtype)

    def within(self, box: Box) -> "Shard":
        """The part of this shard that holds `box`, which must lie inside it."""
        assert self.box.intersect(box) == box, f"{box} is not inside {self.box}"
        steps = (b - a for a, b in zip(self.box.start, box.start, strict=True))
        offset = self.offset + sum(
            n * stride for n, stride in zip(steps, self.strides, strict=True)
        )
        return Shard(box, self.tensor, offset, self.strides, self.dtype)

    def view(self, tensors: "Mapping[str, Tensor]") -> "Tensor":
        """The shard's elements, shape `box.shape`, as a view of the contiguous tensor that holds them."""
        tensor = tensors[self.tensor]
        assert tensor.is_contiguous(), f"{self.tensor} is not contiguous"
        return tensor.as_strided(
            self.box.shape, self.strides, tensor.storage_offset() + self.offset
        )
