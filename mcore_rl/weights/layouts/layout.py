"""A layout says where each HF tensor lies on one side: a placement of pieces and their ranks.

    q_proj [8, 4], cut over 2 ranks,      placement("...q_proj.weight") = Placement((
    two replicas                              PlacedPiece((0, 0), (4, 4), ranks 0 and 2, dtype),
    rows 0-3   ranks 0 2                      PlacedPiece((4, 0), (8, 4), ranks 1 and 3, dtype),
    rows 4-7   ranks 1 3                  ))

Nothing in a layout grows with the number of ranks, and tensors that are cut alike share one
placement. A set of ranks takes a few numbers to write down, however large the cluster is:

    stage of 8 ranks from rank 16 on    16 17 18 19 20 21 22 23
    those of tensor-parallel index 1       17    19    21    23     of 2

The second row is Ranks.grid(17, (4, 2)): from rank 17, 4 steps of 2 ranks.

A tracer's view of a parameter is found again by its memory (`LocalTensors`); several parameters
may lie in one memory block:

    qkv_proj [12, 8]      view qkv_proj[4:8], strides (8, 1)     locate -> ("qkv_proj", 32)
                          a new tensor, or one of another dtype  locate -> None
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise, product
from math import prod
from typing import Literal, Protocol, overload

import torch
from torch import Tensor

from mcore_rl.weights.box import Box, Shard

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
    def from_iterable(ranks: Iterable[int]) -> "Ranks":
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


ROWS, COLUMNS = 0, 1


@dataclass(frozen=True)
class EngineRule:
    """The group of ranks that cuts a tensor, and along which axis; "all" does not cut it.

    blocks     equal blocks of the axis, each of which is cut for itself: q, k and v in one tensor
    multiple   the axis is padded to a multiple of so many elements before it is cut
    is_first   only the first pipeline stage has a tensor of a tower, not every stage
    sections   each section of the table's rules is cut for itself
    """

    group: Literal["all", "attention", "kv_heads", "tensor"]
    axis: int = ROWS
    blocks: int = 1
    multiple: int = 1
    is_first: bool = False
    sections: bool = False


WHOLE = EngineRule("all")
"""The rule of a tensor that every rank holds whole."""


class LocalTensors:
    """The local tensors of a rank; raises ValueError naming one that is not contiguous."""

    def __init__(self, local_tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(local_tensors)
        self.refresh()

    def refresh(self) -> None:
        """Find the tensors where they lie now, after someone gave them new memory."""
        self._storages = {name: tensor.untyped_storage() for name, tensor in self._tensors.items()}
        self._names: dict[int, list[str]] = {}
        """Memory block -> local tensors that lie in it."""
        for name, tensor in self._tensors.items():
            if not tensor.is_contiguous():
                raise ValueError(
                    f"parameter {name!r} is not contiguous (strides {tensor.stride()})"
                )
            self._names.setdefault(self._storages[name]._cdata, []).append(name)

    def locate(self, view: Tensor) -> tuple[str, int] | None:
        """Return (local tensor, element of it that `view` begins at), or None if it is in none."""
        for name in self._names.get(view.untyped_storage()._cdata, ()):
            tensor = self._tensors[name]
            offset = int(view.storage_offset()) - int(tensor.storage_offset())
            if 0 <= offset < tensor.numel() and view.dtype == tensor.dtype:
                return name, offset
        return None

    def check_unchanged(self) -> None:
        """Raise ValueError if a parameter got new memory, to which no recorded place applies."""
        for name, tensor in self._tensors.items():
            if tensor.untyped_storage()._cdata != self._storages[name]._cdata:
                raise ValueError(
                    f"load_weights replaced the memory of parameter {name!r}: cannot be traced"
                )

    @cached_property
    def device(self) -> torch.device:
        """The device of the parameters; the CPU if there are none."""
        return next((tensor.device for tensor in self._tensors.values()), torch.device("cpu"))


@dataclass(frozen=True)
class PlacedPiece:
    """The elements [start, stop) of a tensor, held by each of `ranks` in `dtype` (torch name)."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    ranks: Ranks
    dtype: str


@dataclass(frozen=True, eq=False)
class Placement:
    """The disjoint pieces of a tensor; compared by identity, because tensors share placements."""

    pieces: tuple[PlacedPiece, ...] = ()


NOWHERE = Placement()
"""The placement of a tensor that no rank holds."""


HfTensors = Mapping[str, tuple[tuple[int, ...], str]]
"""HF name -> shape, torch name of the dtype"""


class Layout(Protocol):
    """Where one side holds its tensors. Ranks count from 0 per side, engines all together."""

    @property
    def num_ranks(self) -> int: ...

    def placement(self, name: str) -> Placement:
        """Return the placement of HF tensor `name`; NOWHERE if no rank holds it."""
        ...

    def names(self, rank: int) -> Iterator[str]:
        """Yield every HF tensor of which `rank` holds a piece, each once.

        It may also yield tensors of the rank's layers of which the rank holds nothing: key-value
        heads, where tensor parallelism cuts between them. The work grows with the tensors of the
        rank's layers.
        """
        ...

    def all_names(self) -> Iterator[str]:
        """Yield the HF tensors of which any rank holds a piece, each once."""
        ...


class DescribedLayout(Layout, Protocol):
    """A layout that knows the whole tensors."""

    def hf_tensors(self) -> HfTensors:
        """Return HF name -> (shape, dtype) of every tensor."""
        ...


def list_boxes(layout: Layout, rank: int) -> Iterator[tuple[Box, str]]:
    """Yield (box, dtype) of everything that `rank` holds by `layout`."""
    for name in layout.names(rank):
        for piece in layout.placement(name).pieces:
            if rank in piece.ranks:
                yield Box(name, piece.start, piece.stop), piece.dtype


def check_rank(layout: Layout, rank: int, shards: Iterable[Shard]) -> None:
    """Check that `layout` gives `rank` exactly the boxes of `shards`, which the rank really holds.

    The shards come from the rank's own metadata: sharded_state_dict, or the engine's traced loader.
    They may be cut finer than the layout's pieces, and a box may lie in several local tensors.
    Raises ValueError naming tensor and rank.
    """
    held: dict[str, list[Shard]] = defaultdict(list)
    for shard in shards:
        held[shard.box.name].append(shard)
    own: dict[Placement, list[PlacedPiece]] = {NOWHERE: []}
    """The pieces of a placement that the rank holds."""
    unlike: dict[str, Sequence[PlacedPiece]] = dict.fromkeys(held, ())
    for name in layout.names(rank):
        placement = layout.placement(name)
        if placement not in own:
            own[placement] = [piece for piece in placement.pieces if rank in piece.ranks]
        if _are_alike(held.get(name, ()), own[placement]):
            unlike.pop(name, None)
        else:
            unlike[name] = own[placement]
    for name, pieces in sorted(unlike.items()):
        recorded = [(Box(name, piece.start, piece.stop), piece.dtype) for piece in pieces]
        problem = _find_difference(held.get(name, []), recorded)
        if problem:
            raise ValueError(f"rank {rank}: the recorded layout of {name!r} is wrong: {problem}")


def _are_alike(shards: Sequence[Shard], pieces: Sequence[PlacedPiece]) -> bool:
    """Return whether a tensor's shards are its pieces: one at most of each, as most tensors have.

    It makes no boxes; where it returns False, `_find_difference` decides.
    """
    if len(shards) != 1 or len(pieces) != 1:
        return not shards and not pieces
    (shard,), (piece,) = shards, pieces
    box = shard.box
    return (box.start, box.stop, shard.dtype) == (piece.start, piece.stop, piece.dtype)


def _find_difference(shards: Sequence[Shard], recorded: Sequence[tuple[Box, str]]) -> str | None:
    """Return how the shards of a tensor differ from its recorded boxes, or None if they agree."""
    boxes = {shard.box for shard in shards}
    if not recorded:
        return f"it says that this rank holds none of it, which holds {_show(boxes)}"
    expected = {box for box, _ in recorded}
    if not shards:
        return f"it says {_show(expected)}, of which this rank holds nothing"
    dtypes = {shard.dtype for shard in shards}
    expected_dtypes = {dtype for _, dtype in recorded}
    if dtypes != expected_dtypes:
        return f"dtype {sorted(expected_dtypes)}, really {sorted(dtypes)}"
    overlap = any(a.intersect(b) for a, b in combinations(boxes, 2))
    num_held = sum(box.numel for box in boxes)
    num_expected = sum(box.numel for box in expected)
    if overlap or not num_held == num_expected == _count_common(boxes, expected):
        return f"it says {_show(expected)}, this rank holds {_show(boxes)}"
    return None


def _count_common(boxes: Iterable[Box], expected: Iterable[Box]) -> int:
    """Return the number of elements that are in both lists of disjoint boxes."""
    common = [a.intersect(b) for a, b in product(boxes, expected)]
    return sum(box.numel for box in common if box is not None)


def _show(boxes: Iterable[Box]) -> str:
    spans = sorted((box.start, box.stop) for box in boxes)
    more = f" and {len(spans) - 4} more" if len(spans) > 4 else ""
    return ", ".join(f"{start}-{stop}" for start, stop in spans[:4]) + more
