"""Boxes of one tensor in, an error unless they make it up, each element once."""

from collections.abc import Sequence
from math import prod

from mcore_rl.slices.families.table import Shape


def check_boxes(
    key: str, shape: Shape, boxes: Sequence[tuple[Shape, Shape]], where: object
) -> None:
    """`boxes` are (offset, shape); ValueError names `where`, the tensor and the box.

    Equal volume and no overlap make a partition. Overlaps are looked for in the grid that the boxes' own
    edges make: time grows with its cells.
    """
    for offset, size in boxes:
        inside = len(offset) == len(size) == len(shape) and all(
            a >= 0 and n > 0 and a + n <= whole
            for a, n, whole in zip(offset, size, shape, strict=True)
        )
        if not inside:
            raise ValueError(
                f"{where}: tensor {key!r} of shape {shape} has a part at {offset} of shape {size}, which is "
                "not inside it"
            )
    have, whole = sum(prod(size) for _, size in boxes), prod(shape)
    if have != whole:
        raise ValueError(
            f"{where}: tensor {key!r} of shape {shape}: its parts hold {have} of {whole} elements"
        )
    if len(boxes) == 1:
        return
    edges = [
        sorted(
            {edge for offset, size in boxes for edge in (offset[axis], offset[axis] + size[axis])}
        )
        for axis in range(len(shape))
    ]
    number = [{edge: i for i, edge in enumerate(axis_edges)} for axis_edges in edges]
    taken: set[Shape] = set()
    for offset, size in boxes:
        for cell in _cells(number, offset, size):
            if cell in taken:
                raise ValueError(
                    f"{where}: tensor {key!r} of shape {shape}: its parts overlap at {offset}"
                )
            taken.add(cell)


def _cells(number: Sequence[dict[int, int]], offset: Shape, size: Shape) -> list[Shape]:
    cells: list[Shape] = [()]
    for axis, (start, count) in enumerate(zip(offset, size, strict=True)):
        steps = range(number[axis][start], number[axis][start + count])
        cells = [(*cell, step) for cell in cells for step in steps]
    return cells
