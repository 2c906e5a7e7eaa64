"""Shards of every rank in, a layout of them out: for what was traced or read off metadata rank by rank."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from mcore_rl.slices.box import Box, Shard, subtract
from mcore_rl.slices.layouts.layout import NOWHERE, Piece, Placement
from mcore_rl.slices.layouts.ranks import Ranks


class ListedLayout:
    """Grows with the shards of all ranks: for few ranks, and for checking the rules."""

    def __init__(self, shards: Sequence[Iterable[Shard]]) -> None:
        """`shards[rank]` is what a rank holds. ValueError names a tensor that has two dtypes."""
        self._names = [sorted({shard.box.name for shard in held}) for held in shards]
        self._dtypes: dict[str, str] = {}
        self._holders: dict[str, dict[Box, set[int]]] = defaultdict(lambda: defaultdict(set))
        for rank, held in enumerate(shards):
            for shard in held:
                name = shard.box.name
                if self._dtypes.setdefault(name, shard.dtype) != shard.dtype:
                    raise ValueError(
                        f"{name!r} is {shard.dtype} on rank {rank}, but {self._dtypes[name]} on another rank"
                    )
                self._holders[name][shard.box].add(rank)
        self.placement = cache(self._placement)

    @property
    def num_ranks(self) -> int:
        return len(self._names)

    def names(self, rank: int) -> Iterator[str]:
        return iter(self._names[rank])

    def all_names(self) -> Iterator[str]:
        return iter(self._holders)

    def _placement(self, name: str) -> Placement:
        if name not in self._holders:
            return NOWHERE
        pieces = _refine(self._holders[name])
        return Placement(
            tuple(
                Piece(box.start, box.stop, Ranks.of(ranks), self._dtypes[name])
                for box, ranks in sorted(pieces, key=lambda piece: piece[0].start)
            )
        )


def _refine(holders: dict[Box, set[int]]) -> list[tuple[Box, set[int]]]:
    """Boxes that may overlap, cut up until they do not."""
    done: list[tuple[Box, set[int]]] = []
    for box in sorted(holders, key=lambda box: (box.start, box.stop)):
        rest, refined = [box], []
        for other, ranks in done:
            common = box.intersect(other)
            if common is None:
                refined.append((other, ranks))
                continue
            refined.append((common, ranks | holders[box]))
            refined += [(part, ranks) for part in subtract(other, common)]
            rest = [part for piece in rest for part in _without(piece, common)]
        done = refined + [(part, holders[box]) for part in rest]
    return done


def _without(box: Box, hole: Box) -> list[Box]:
    common = box.intersect(hole)
    return [box] if common is None else subtract(box, common)
