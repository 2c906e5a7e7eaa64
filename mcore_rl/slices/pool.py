"""Boxes that the same ranks hold and want, laid end to end, in; any stretch of them out, again as boxes."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from mcore_rl.slices.box import Box, itemsize
from mcore_rl.slices.layouts.ranks import Ranks

Cell = tuple[str, tuple[int, ...], tuple[int, ...]]
"""HF name, start, stop"""

Cut = tuple[int, int]
"""(cell, row of it) at which a pool is cut"""


@dataclass(frozen=True)
class Grain:
    """How finely boxes are cut to even out the load.

    min_bytes   no box of fewer bytes is cut
    rows        cuts lie at multiples of so many rows of the HF tensor (128 keeps FP8 blocks whole)
    """

    min_bytes: int = 1 << 16
    rows: int = 1


@dataclass(frozen=True)
class Slice:
    """A box that travels in `dtype`, its elements in row-major order."""

    box: Box
    dtype: str

    @property
    def num_bytes(self) -> int:
        return self.box.numel * itemsize(self.dtype)


class Pool:
    """Cells in the order of name and start; bytes are those of the wanters' dtype."""

    def __init__(
        self, holders: Ranks, wanters: Ranks, dtype: str, cells: Sequence[Cell], grain: Grain
    ) -> None:
        self.holders, self.wanters, self.dtype = holders, wanters, dtype
        self._cells, self._grain = sorted(cells), grain
        size = itemsize(dtype)
        self._row_bytes = [
            size * prod(b - a for a, b in zip(start[1:], stop[1:], strict=True)) if start else size
            for _, start, stop in self._cells
        ]
        numels = (
            row * (stop[0] - start[0] if start else 1)
            for row, (_, start, stop) in zip(self._row_bytes, self._cells, strict=True)
        )
        self._ends = list(accumulate(numels, initial=0))

    @property
    def sort_key(self) -> tuple[Cell, str]:
        return self._cells[0], self.dtype

    @property
    def num_bytes(self) -> int:
        return self._ends[-1]

    def cut(self, part: int, parts: int) -> Cut:
        """Where to cut, at or before `part` / `parts` of the bytes; rises with it, exact at 0 and 1."""
        position = self.num_bytes * part // parts
        cell = bisect_right(self._ends, position) - 1
        if cell >= len(self._cells):
            return len(self._cells), 0
        if self._ends[cell + 1] - self._ends[cell] < self._grain.min_bytes or not self._cells[cell][1]:
            return cell, 0
        first = self._cells[cell][1][0]
        row = first + (position - self._ends[cell]) // self._row_bytes[cell]
        return cell, max(0, row - row % self._grain.rows - first)

    def bytes_before(self, cut: Cut) -> int:
        cell, row = cut
        return self._ends[cell] + (row * self._row_bytes[cell] if row else 0)

    def slices(self, begin: Cut, end: Cut) -> tuple[Slice, ...]:
        """The boxes between two cuts."""
        last, last_row = end
        found = []
        cell, row = begin
        while (cell, row) < end:
            name, start, stop = self._cells[cell]
            first, past = (row, last_row) if cell == last else (row, 0)
            if first or past:
                rows = (start[0] + first, start[0] + past if past else stop[0])
                start, stop = (rows[0], *start[1:]), (rows[1], *stop[1:])
            found.append(Slice(Box(name, start, stop), self.dtype))
            cell, row = cell + 1, 0
        return tuple(found)
