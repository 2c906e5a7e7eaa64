"""Sets of ranks that are written down in a few numbers, however large the cluster is.

tensor-parallel index 1 of 2, in a stage of 8 ranks from rank 16 on:  17 19 21 23 = Ranks.grid(17, (4, 2))
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
    """first + sum(i * stride); dims from the outermost, each step longer than all within, so it ascends."""

    first: int
    dims: tuple[Dim, ...]

    @cached_property
    def size(self) -> int:
        return prod(size for size, _ in self.dims)

    @cached_property
    def last(self) -> int:
        return self.first + sum((size - 1) * stride for size, stride in self.dims)

    def at(self, i: int) -> int:
        rank = self.first
        for size, stride in reversed(self.dims):
            i, step = divmod(i, size)
            rank += step * stride
        return rank

    def find(self, rank: int) -> int | None:
        left, i = rank - self.first, 0
        for size, stride in self.dims:
            step = min(left // stride, size - 1)
            left -= step * stride
            i = i * size + step
        return i if left == 0 else None


@dataclass(frozen=True)
class Ranks(Sequence[int]):
    """Ascending ranks without repetition: one or more grids, each of which begins after the last one ends."""

    grids: tuple[_Grid, ...]

    @staticmethod
    def grid(first: int, *dims: Dim) -> "Ranks":
        """`dims` (steps, ranks per step) from the outermost; a step is longer than what lies within it."""
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
        """Any ranks: the runs of neighbours among them."""
        runs: list[list[int]] = []
        for rank in sorted(set(ranks)):
            if runs and rank == runs[-1][0] + runs[-1][1]:
                runs[-1][1] += 1
            else:
                runs.append([rank, 1])
        return Ranks(tuple(_Grid(first, ((size, 1),) if size > 1 else ()) for first, size in runs))

    def union(self, other: "Ranks") -> "Ranks":
        """Both; one must begin after the other ends, or both be the same."""
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
        """Place of `rank` among these, counted from 0; None if it is not one of them."""
        before = 0
        for grid in self.grids:
            if grid.first <= rank <= grid.last and (i := grid.find(rank)) is not None:
                return before + i
            before += grid.size
        return None
