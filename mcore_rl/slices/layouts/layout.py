"""What a layout is: for each HF tensor its pieces and who holds them, for each rank the tensors it holds.

    q_proj [8, 4] cut over 2 ranks, two replicas      placement("...q_proj.weight") =
    rows 0-3 on ranks 0 2, rows 4-7 on ranks 1 3          Piece((0, 0), (4, 4), {0, 2}), Piece((4, 0), ...)

Nothing in a layout grows with the number of ranks, and tensors that are cut alike share one placement.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

from mcore_rl.slices.box import Box, Shard
from mcore_rl.slices.layouts.ranks import Ranks


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a tensor, held by each of `ranks` in the torch dtype named `dtype`."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    ranks: Ranks
    dtype: str


@dataclass(frozen=True, eq=False)
class Placement:
    """Disjoint pieces of a tensor with all ranks that hold each; compared by identity, as it is shared."""

    pieces: tuple[Piece, ...] = ()


NOWHERE = Placement()
"""The placement of a tensor that no rank holds."""


class Layout(Protocol):
    """Ranks count from 0 on each side (trainer ranks, or the ranks of all engines)."""

    @property
    def num_ranks(self) -> int: ...

    def placement(self, name: str) -> Placement:
        """Where HF tensor `name` lies; NOWHERE if no rank holds it."""
        ...

    def names(self, rank: int) -> Iterator[str]:
        """The HF tensors of which `rank` holds a piece, each once, in work that grows with their number."""
        ...

    def all_names(self) -> Iterator[str]:
        """The HF tensors of which any rank holds a piece, each once."""
        ...


def boxes_of(layout: Layout, rank: int) -> Iterator[tuple[Box, str]]:
    """(box, dtype) of everything that `rank` holds by `layout`."""
    for name in layout.names(rank):
        for piece in layout.placement(name).pieces:
            if rank in piece.ranks:
                yield Box(name, piece.start, piece.stop), piece.dtype


def check_rank(layout: Layout, rank: int, shards: Iterable[Shard]) -> None:
    """ValueError naming tensor and rank unless `layout` gives `rank` exactly the boxes of its own `shards`.

    `shards` is what the rank's own metadata says (sharded_state_dict, or the engine's traced loader); they
    may be cut finer than the layout's pieces, and a box may lie in more than one local tensor.
    """
    real: dict[str, list[Shard]] = defaultdict(list)
    for shard in shards:
        real[shard.box.name].append(shard)
    ruled: dict[str, list[tuple[Box, str]]] = defaultdict(list)
    for box, dtype in boxes_of(layout, rank):
        ruled[box.name].append((box, dtype))
    for name in sorted(real.keys() | ruled.keys()):
        problem = _difference(real.get(name, []), ruled.get(name, []))
        if problem:
            raise ValueError(f"rank {rank}: the recorded layout of {name!r} is wrong: {problem}")


def _difference(shards: Sequence[Shard], ruled: Sequence[tuple[Box, str]]) -> str | None:
    boxes = {shard.box for shard in shards}
    if not ruled:
        return f"it says that this rank holds none of it, which holds {_show(boxes)}"
    expected = {box for box, _ in ruled}
    if not shards:
        return f"it says {_show(expected)}, of which this rank holds nothing"
    dtypes = {shard.dtype for shard in shards} ^ {dtype for _, dtype in ruled}
    if dtypes:
        return f"dtype {sorted({dtype for _, dtype in ruled})}, really {sorted({s.dtype for s in shards})}"
    overlap = any(a.intersect(b) for a, b in combinations(boxes, 2))
    common = sum(both.numel for a in boxes for b in expected if (both := a.intersect(b)))
    sizes = {sum(box.numel for box in boxes), sum(box.numel for box in expected), common}
    if overlap or len(sizes) > 1:
        return f"it says {_show(expected)}, this rank holds {_show(boxes)}"
    return None


def _show(boxes: Iterable[Box]) -> str:
    spans = sorted((box.start, box.stop) for box in boxes)
    more = f" and {len(spans) - 4} more" if len(spans) > 4 else ""
    return ", ".join(f"{start}-{stop}" for start, stop in spans[:4]) + more
