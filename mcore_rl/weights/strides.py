"""Strides of contiguous tensors, and padding as a strided view of one; without numpy or torch.

shape [2, 3]   strides (3, 1)   element 4 is at (1, 1)
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


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
