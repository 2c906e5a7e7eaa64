"""A strided view of an HF tensor and the memory it is copied to in, shards (boxes with local strides) out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from torch import Tensor

from mcore_rl.slices.box import Box, Shard
from mcore_rl.slices.plan.coverage import contiguous_strides


@dataclass(frozen=True)
class _Dim:
    """`size` steps of `source` elements in the HF tensor and of `target` elements in the local tensor."""

    size: int
    source: int
    target: int


def shards_of_view(
    name: str,
    hf_shape: Sequence[int],
    view: Tensor,
    tensor: str,
    offset: int,
    strides: Sequence[int],
    dtype: str,
) -> list[Shard]:
    """The shards that copying `view`, of a contiguous tensor of `hf_shape`, to local memory gives.

    tensor, offset, strides, dtype   the local memory, of the shape of `view`, in elements
    Several shards where the view is no box (rows taken in steps, heads interleaved); ValueError where an axis
    of the view wraps around the edge of the HF tensor.
    """
    if view.numel() == 0:
        return []
    dims = [
        _Dim(*dim) for dim in zip(view.shape, view.stride(), strides, strict=True) if dim[0] > 1
    ]
    hf_strides = contiguous_strides(hf_shape)
    shards = []
    for source, target, box_dims in _boxes(_merge(dims), hf_strides):
        start = _unravel(int(view.storage_offset()) + source, hf_shape)
        extents, local = _extents(name, hf_shape, hf_strides, start, box_dims)
        stop = tuple(a + n for a, n in zip(start, extents, strict=True))
        shards.append(Shard(Box(name, start, stop), tensor, offset + target, local, dtype))
    return shards


def _merge(dims: list[_Dim]) -> list[_Dim]:
    """Outermost first, adjacent dimensions made one where both memories allow it."""
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


def _boxes(dims: list[_Dim], hf_strides: Sequence[int]) -> Iterator[tuple[int, int, list[_Dim]]]:
    """Steps along what is no axis of the HF tensor: offset in it, local offset, dimensions of the box."""
    box_dims: list[_Dim] = []
    stepped: list[_Dim] = []
    taken: set[int] = set()
    for dim in reversed(dims):
        is_axis = dim.source in hf_strides and dim.source not in taken
        (box_dims if is_axis else stepped).append(dim)
        taken.add(dim.source)
    for steps in product(*(range(dim.size) for dim in reversed(stepped))):
        pairs = list(zip(steps, reversed(stepped), strict=True))
        yield (
            sum(n * dim.source for n, dim in pairs),
            sum(n * dim.target for n, dim in pairs),
            box_dims,
        )


def _unravel(element: int, shape: Sequence[int]) -> tuple[int, ...]:
    index = []
    for stride in contiguous_strides(shape):
        index.append(element // stride)
        element %= stride
    return tuple(index)


def _extents(
    name: str,
    hf_shape: Sequence[int],
    hf_strides: Sequence[int],
    start: Sequence[int],
    dims: list[_Dim],
) -> tuple[list[int], tuple[int, ...]]:
    """Extent and local stride on each HF axis; what exceeds an axis continues on the next outer one."""
    extents = [1] * len(hf_shape)
    local = list(contiguous_strides(hf_shape))
    for dim in dims:
        axis = max(
            a for a, stride in enumerate(hf_strides) if stride == dim.source and hf_shape[a] > 1
        )
        size, target = dim.size, dim.target
        while size > hf_shape[axis] - start[axis]:
            if start[axis] != 0 or size % hf_shape[axis] or axis == 0 or extents[axis] != 1:
                raise ValueError(
                    f"a view of HF tensor {name!r} wraps around axis {axis}: cannot be traced"
                )
            extents[axis], local[axis] = hf_shape[axis], target
            size, target, axis = size // hf_shape[axis], target * hf_shape[axis], axis - 1
        if extents[axis] != 1:
            raise ValueError(
                f"a view of HF tensor {name!r} crosses axis {axis} twice: cannot be traced"
            )
        extents[axis], local[axis] = size, target
    return extents, tuple(local)
