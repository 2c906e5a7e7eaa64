"""A box is a part of a HuggingFace tensor; a shard is a box and the local memory that holds it.

    HF tensor "q_proj.weight" [8, 4]         local tensor "qkv.weight" [6, 4] of one rank
    rows 0-3  . . . .                        rows 0-1  # # # #  <- Shard(box, "qkv.weight", ...)
    rows 4-5  # # # #  <- box           ==>  rows 2-3  k k k k     offset=0, strides=(4, 1)
    rows 6-7  . . . .                        rows 4-5  v v v v

Training ranks, engine ranks and checkpoint files all describe what they hold as lists of shards,
and boxes always count in the HF tensor's own rows and columns. Loading, syncing, exporting and
verifying are therefore one operation: intersect two lists of boxes and copy the intersections.

This module does without numpy and torch, because importing torch takes longer than a plan or a
small merge.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from operator import lt, sub
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
ITEMSIZE: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "complex128": 16,
    "complex64": 8,
    "complex32": 4,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}
"""torch name of a dtype -> bytes per element."""


@dataclass(frozen=True)
class Box:
    """The elements [start, stop) on each axis of the HF tensor `name`; never empty."""

    name: str
    start: Shape
    stop: Shape

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop) or not all(map(lt, self.start, self.stop)):
            raise ValueError(
                f"box of {self.name}: start {self.start} and stop {self.stop} enclose nothing"
            )

    @property
    def shape(self) -> Shape:
        return tuple(map(sub, self.stop, self.start))

    @property
    def numel(self) -> int:
        return count_elements(self.start, self.stop)

    def intersect(self, other: "Box") -> "Box | None":
        """Return the box of the elements in both boxes, or None if they share none."""
        if self.name != other.name:
            return None
        if self.start == other.start and self.stop == other.stop:
            return self
        common = find_common(self.start, self.stop, other.start, other.stop)
        return None if common is None else Box(self.name, *common)


@dataclass(frozen=True)
class Shard:
    """A box of an HF tensor, and where it lies in a local tensor.

    tensor    name of the local tensor
    offset    element of the local tensor at which the box begins
    strides   elements of the local tensor per step along each axis of the box
    dtype     torch name of the local tensor's dtype, such as "bfloat16"
    """

    box: Box
    tensor: str
    offset: int
    strides: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return self.box.numel * itemsize(self.dtype)

    def within(self, box: Box) -> "Shard":
        """Return the part of this shard that holds `box`, which must lie inside the shard's box."""
        if box == self.box:
            return self
        assert self.box.intersect(box) == box, f"{box} is not inside {self.box}"
        offset = self.offset
        for before, after, stride in zip(self.box.start, box.start, self.strides, strict=True):
            offset += (after - before) * stride
        return Shard(box, self.tensor, offset, self.strides, self.dtype)

    def view(self, tensors: "Mapping[str, Tensor]") -> "Tensor":
        """Return the shard's elements as a view of its local tensor, of shape `box.shape`.

        `tensors` maps names to contiguous tensors.
        """
        tensor = tensors[self.tensor]
        assert tensor.is_contiguous(), f"{self.tensor} is not contiguous"
        return tensor.as_strided(
            self.box.shape, self.strides, tensor.storage_offset() + self.offset
        )


@dataclass(frozen=True)
class Padding:
    """Elements of the local tensor `tensor` that no HF tensor has: a strided view, in elements."""

    tensor: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def view(self, tensors: "Mapping[str, Tensor]") -> "Tensor":
        """Return these elements of `tensors`, which maps names to contiguous tensors."""
        tensor = tensors[self.tensor]
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)


def count_elements(start: Shape, stop: Shape) -> int:
    """Return the number of elements in [start, stop)."""
    return prod(map(sub, stop, start))


def find_common(
    start: Shape, stop: Shape, other_start: Shape, other_stop: Shape
) -> tuple[Shape, Shape] | None:
    """Return the start and stop of what [start, stop) shares with another box, None if nothing."""
    latest = tuple(map(max, start, other_start))
    first = tuple(map(min, stop, other_stop))
    return (latest, first) if all(map(lt, latest, first)) else None


def subtract(box: Box, hole: Box) -> list[Box]:
    """Return `box` without `hole`, which must lie inside it, as disjoint boxes."""
    rest = []
    start = list(box.start)
    stop = list(box.stop)
    for axis in range(len(start)):
        if start[axis] < hole.start[axis]:
            before_stop = (*stop[:axis], hole.start[axis], *stop[axis + 1 :])
            rest.append(Box(box.name, tuple(start), before_stop))
        if hole.stop[axis] < stop[axis]:
            after_start = (*start[:axis], hole.stop[axis], *start[axis + 1 :])
            rest.append(Box(box.name, after_start, tuple(stop)))
        start[axis] = hole.start[axis]
        stop[axis] = hole.stop[axis]
    return rest


def itemsize(dtype: str) -> int:
    """Return the bytes per element of the torch dtype named `dtype`."""
    return ITEMSIZE[dtype]


def contiguous_strides(shape: Iterable[int]) -> tuple[int, ...]:
    """Return the elements per step along each axis of a contiguous tensor of `shape`."""
    sizes = tuple(shape)
    return tuple(prod(sizes[axis + 1 :]) for axis in range(len(sizes)))


def unravel(element: int, shape: Iterable[int]) -> tuple[int, ...]:
    """Return the index of element number `element` of a contiguous tensor of `shape`."""
    index = []
    for stride in contiguous_strides(shape):
        index.append(element // stride)
        element %= stride
    return tuple(index)
