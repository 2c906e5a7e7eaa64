"""Returns the shards that result from copying a strided view of an HF tensor to local memory.

    HF tensor [4, 2]      view: every second row      local tensor [2, 2]
    row 0  a b            a b                         a b  <- Shard(box of row 0, offset=0)
    row 1  c d            e f               --copy->  e f  <- Shard(box of row 2, offset=2)
    row 2  e f
    row 3  g h

A view that is a single box gives a single shard.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from torch import Tensor

from mcore_rl.weights.box import Box, Shard, contiguous_strides, unravel


@dataclass(frozen=True)
class _Dim:
    """A dimension of the copy: `size` steps of `source` elements in the HF tensor.

    Each is a step of `target` elements in the local tensor.
    """

    size: int
    source: int
    target: int


@dataclass(frozen=True)
class _Part:
    """The box [start, stop) of the HF tensor, and where it lies from the local memory's begin."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


def cut_view(
    name: str,
    hf_shape: Sequence[int],
    view: Tensor,
    tensor: str,
    offset: int,
    strides: Sequence[int],
    dtype: str,
) -> list[Shard]:
    """Return the shards that result from copying `view` to local memory.

    view                       a view of a contiguous tensor of shape `hf_shape`
    tensor, offset, strides    the local memory, which has the shape of `view`, in elements

    A view that is not a box (rows taken in steps, heads interleaved) gives several shards. Raises
    ValueError if an axis of the view wraps around the edge of the HF tensor.
    """
    if view.numel() == 0:
        return []
    first = int(view.storage_offset())
    try:
        parts = _list_parts(
            tuple(hf_shape), tuple(view.shape), view.stride(), first, tuple(strides)
        )
    except ValueError as error:
        raise ValueError(f"a view of HF tensor {name!r} {error}: cannot be traced") from error
    return [
        Shard(Box(name, part.start, part.stop), tensor, offset + part.offset, part.strides, dtype)
        for part in parts
    ]


@lru_cache(maxsize=4096)
def _list_parts(
    hf_shape: tuple[int, ...],
    shape: tuple[int, ...],
    source_strides: tuple[int, ...],
    first: int,
    target_strides: tuple[int, ...],
) -> tuple[_Part, ...]:
    """Return the boxes of a view that begins at element `first` of the HF tensor.

    The tensors of all experts are cut alike, so most calls find their answer. Raises ValueError
    with what the view does if it is not made of boxes.
    """
    dims = []
    for size, source, target in zip(shape, source_strides, target_strides, strict=True):
        if size > 1:
            dims.append(_Dim(size, source, target))
    hf_strides = contiguous_strides(hf_shape)
    parts = []
    for source, target, box_dims in _list_boxes(_merge(dims), hf_strides):
        start = unravel(first + source, hf_shape)
        extents, local = _find_extents(hf_shape, hf_strides, start, box_dims)
        stop = tuple(a + n for a, n in zip(start, extents, strict=True))
        parts.append(_Part(start, stop, target, local))
    return tuple(parts)


def _merge(dims: list[_Dim]) -> list[_Dim]:
    """Return the dimensions outermost first, adjacent ones merged where both memories allow it."""
    merged: list[_Dim] = []
    for dim in sorted(dims, key=lambda dim: -dim.source):
        outer = merged[-1] if merged else None
        if (
            outer
            and outer.source == dim.size * dim.source
            and outer.target == dim.size * dim.target
        ):
            merged[-1] = _Dim(outer.size * dim.size, dim.source, dim.target)
        else:
            merged.append(dim)
    return merged


def _list_boxes(
    dims: list[_Dim], hf_strides: Sequence[int]
) -> Iterator[tuple[int, int, list[_Dim]]]:
    """Split the copy into boxes by stepping along dimensions that are no axis of the HF tensor.

    Yields (offset in the HF tensor, offset in local memory, dimensions of the box) for each box.
    """
    box_dims: list[_Dim] = []
    stepped: list[_Dim] = []
    taken: set[int] = set()
    for dim in reversed(dims):
        is_axis = dim.source in hf_strides and dim.source not in taken
        (box_dims if is_axis else stepped).append(dim)
        taken.add(dim.source)
    for steps in product(*(range(dim.size) for dim in reversed(stepped))):
        source = 0
        target = 0
        for n, dim in zip(steps, reversed(stepped), strict=True):
            source += n * dim.source
            target += n * dim.target
        yield source, target, box_dims


def _find_extents(
    hf_shape: Sequence[int],
    hf_strides: Sequence[int],
    start: Sequence[int],
    dims: list[_Dim],
) -> tuple[list[int], tuple[int, ...]]:
    """Return the box's extent and its local stride on each HF axis.

    A dimension that is longer than an axis continues on the next outer axis.
    """
    extents = [1] * len(hf_shape)
    local = list(contiguous_strides(hf_shape))
    for dim in dims:
        axis = max(
            a for a, stride in enumerate(hf_strides) if stride == dim.source and hf_shape[a] > 1
        )
        size = dim.size
        target = dim.target
        while size > hf_shape[axis] - start[axis]:
            if start[axis] != 0 or size % hf_shape[axis] or axis == 0 or extents[axis] != 1:
                raise ValueError(f"wraps around axis {axis}")
            extents[axis], local[axis] = hf_shape[axis], target
            size //= hf_shape[axis]
            target *= hf_shape[axis]
            axis -= 1
        if extents[axis] != 1:
            raise ValueError(f"crosses axis {axis} twice")
        extents[axis], local[axis] = size, target
    return extents, tuple(local)
