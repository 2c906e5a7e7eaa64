"""Sets of ranks that take a few numbers to write down, however large the cluster is.

    stage of 8 ranks from rank 16 on    16 17 18 19 20 21 22 23
    those of tensor-parallel index 1       17    19    21    23     of 2

The second row is Ranks.grid(17, (4, 2)): from rank 17, 4 steps of 2 ranks.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import overload

Dim = tuple[int, int]
"""(number of steps, ranks per step)"""


@dataclass(frozen=True)
class _Grid:
    """The ranks first + sum(i * stride) for all i in each dimension, outermost dimension first.

    A step is longer than all that lies within it, so that the ranks ascend.
    """

    first: int
    dims: tuple[Dim, ...]

    @cached_property
    def size(self) -> int:
        return prod(size for size, _ in self.dims)

    @cached_property
    def last(self) -> int:
        return self.first + sum((size - 1) * stride for size, stride in self.dims)

    def at(self, i: int) -> int:
        """Return rank number `i` of the grid."""
        rank = self.first
        for size, stride in reversed(self.dims):
            i, step = divmod(i, size)
            rank += step * stride
        return rank

    def find(self, rank: int) -> int | None:
        """Return the number of `rank` in the grid, or None if it is not one of its ranks."""
        left = rank - self.first
        i = 0
        for size, stride in self.dims:
            step = min(left // stride, size - 1)
            left -= step * stride
            i = i * size + step
        return i if left == 0 else None


@dataclass(frozen=True)
class Ranks(Sequence[int]):
    """Ascending ranks without repetition, as grids; each begins after the one before it ends."""

    grids: tuple[_Grid, ...]

    @staticmethod
    def grid(first: int, *dims: Dim) -> "Ranks":
        """Return the ranks of one grid from rank `first` on.

        `dims` are (number of steps, ranks per step), outermost first.
        """
        merged: list[Dim] = []
        for size, stride in dims:
            if size == 1:
                continue
            if merged and merged[-1][1] == size * stride:
                merged[-1] = (merged[-1][0] * size, stride)
            else:
                merged.append((size, stride))
        extent = 0
        for size, stride in reversed(merged):
            assert stride > extent, f"ranks from {first} by {dims} do not ascend"
            extent += (size - 1) * stride
        return Ranks((_Grid(first, tuple(merged)),))

    @staticmethod
    def of(ranks: Iterable[int]) -> "Ranks":
        """Return any set of ranks, as runs of consecutive ranks."""
        runs: list[list[int]] = []
        for rank in sorted(set(ranks)):
            if runs and rank == runs[-1][0] + runs[-1][1]:
                runs[-1][1] += 1
            else:
                runs.append([rank, 1])
        return Ranks(tuple(_Grid(first, ((size, 1),) if size > 1 else ()) for first, size in runs))

    def union(self, other: "Ranks") -> "Ranks":
        """Return the ranks of both, which must be equal or whose grids must not interleave."""
        if self == other or not other.grids:
            return self
        both = sorted((*self.grids, *other.grids), key=lambda grid: grid.first)
        for before, after in pairwise(both):
            assert before.last < after.first, f"{self} and {other} overlap"
        return Ranks(tuple(both))

    @cached_property
    def _len(self) -> int:
        return sum(grid.size for grid in self.grids)

    @cached_property
    def _hash(self) -> int:
        return hash(self.grids)

    def __hash__(self) -> int:
        return self._hash

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[int]:
        return (grid.at(i) for grid in self.grids for i in range(grid.size))

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and self.find(rank) is not None

    @overload
    def __getitem__(self, i: int) -> int: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[int]: ...
    def __getitem__(self, i: int | slice) -> int | Sequence[int]:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        for grid in self.grids:
            if i < grid.size:
                return grid.at(i)
            i -= grid.size
        raise IndexError(i)

    def find(self, rank: int) -> int | None:
        """Return the position of `rank` among these, from 0, or None if it is not one of them."""
        before = 0
        for grid in self.grids:
            if grid.first <= rank <= grid.last and (i := grid.find(rank)) is not None:
                return before + i
            before += grid.size
        return None
