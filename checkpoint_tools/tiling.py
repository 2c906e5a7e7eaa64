"""Checks that boxes cover each element of a tensor exactly once."""

from collections.abc import Sequence
from math import prod

from mcore_rl.weights.models.table import Shape


def check_boxes(
    key: str, shape: Shape, boxes: Sequence[tuple[Shape, Shape]], where: object
) -> None:
    """Raise ValueError unless `boxes`, (offset, shape), cover each element of the tensor once.

    The error has `where`, the tensor and the box. Boxes inside the tensor cover it once if they do
    not overlap and their volumes add up to the tensor's. Overlaps are searched in the grid of the
    boxes' edges; the time grows with the number of its cells.
    """
    for offset, size in boxes:
        if not _is_inside(offset, size, shape):
            raise ValueError(
                f"{where}: tensor {key!r} of shape {shape} has a part at {offset} of shape {size},"
                " which is not inside it"
            )
    volume = sum(prod(size) for _, size in boxes)
    if volume != prod(shape):
        raise ValueError(
            f"{where}: tensor {key!r} of shape {shape}: its parts hold {volume} of {prod(shape)}"
            " elements"
        )
    if len(boxes) == 1:
        return
    numbers = [_edge_numbers(boxes, axis) for axis in range(len(shape))]
    taken: set[Shape] = set()
    for offset, size in boxes:
        for cell in _cells(numbers, offset, size):
            if cell in taken:
                raise ValueError(
                    f"{where}: tensor {key!r} of shape {shape}: its parts overlap at {offset}"
                )
            taken.add(cell)


def _is_inside(offset: Shape, size: Shape, shape: Shape) -> bool:
    if not len(offset) == len(size) == len(shape):
        return False
    for start, count, whole in zip(offset, size, shape, strict=True):
        if start < 0 or count <= 0 or start + count > whole:
            return False
    return True


def _edge_numbers(boxes: Sequence[tuple[Shape, Shape]], axis: int) -> dict[int, int]:
    """Number the edges that any box has on an axis, in ascending order."""
    edges: set[int] = set()
    for offset, size in boxes:
        edges.update((offset[axis], offset[axis] + size[axis]))
    return {edge: number for number, edge in enumerate(sorted(edges))}


def _cells(numbers: Sequence[dict[int, int]], offset: Shape, size: Shape) -> list[Shape]:
    """Return the cells of the grid of edges that a box covers."""
    cells: list[Shape] = [()]
    for axis, (start, count) in enumerate(zip(offset, size, strict=True)):
        steps = range(numbers[axis][start], numbers[axis][start + count])
        cells = [(*cell, step) for cell in cells for step in steps]
    return cells
