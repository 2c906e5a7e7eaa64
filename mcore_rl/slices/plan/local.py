"""Two layouts and a rank in, that rank's own part of the plan out. Pure; sender and receiver agree unasked.

Both ends of a pair see the same shared_regions (boxes with the same sources and the same targets), since each holds or
wants every box of those it is part of, and divide them by the same rule. Time and memory grow with the boxes
that the rank itself holds or wants, not with the number of ranks.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from mcore_rl.slices.box import Box
from mcore_rl.slices.layouts.layout import Layout, Placement
from mcore_rl.slices.layouts.quantised import (
    check_blocks,
    check_scales,
    is_quantised,
    join_rows,
    shape_of,
    travels_with_matrix,
)
from mcore_rl.slices.layouts.ranks import Ranks
from mcore_rl.slices.plan.shared_region import BoxSpan, SharedRegion, Slice, SplitGranularity
from mcore_rl.slices.plan.shares import Move, Shares, Topology

GRAIN = SplitGranularity()


@dataclass(frozen=True)
class Flow:
    """What travels between this rank and `peer`, in order; both ends have it equal but for the peer."""

    peer: int
    parts: tuple[tuple[Slice, ...], ...]
    """Slices in order, in parts that flows to several peers share."""

    @property
    def slices(self) -> Iterator[Slice]:
        return (piece for part in self.parts for piece in part)

    @cached_property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.slices)

    @cached_property
    def digest(self) -> str:
        """sha256 of the boxes and dtypes in order: equal on both ends exactly if they agree."""
        lines = hashlib.sha256()
        for piece in self.slices:
            lines.update(
                f"{piece.box.name} {piece.box.start} {piece.box.stop} {piece.dtype}\n".encode()
            )
        return lines.hexdigest()


def plan_sends(
    rank: int,
    source: Layout,
    target: Layout,
    topology: Topology,
    granularity: SplitGranularity = GRAIN,
) -> tuple[Flow, ...]:
    """What trainer rank `rank` sends to whom, in the order of the engine ranks."""
    return _flows(
        (region, Shares(region.sources, region.targets, topology).sends(rank))
        for region in shared_regions(
            source.names(rank), source, target, granularity, source_rank=rank
        )
    )


def plan_recvs(
    rank: int,
    source: Layout,
    target: Layout,
    topology: Topology,
    granularity: SplitGranularity = GRAIN,
) -> tuple[Flow, ...]:
    """What engine rank `rank` gets, in the order of the trainer ranks.

    ValueError names a box that no trainer rank holds.
    """
    return _flows(
        (region, Shares(region.sources, region.targets, topology).recvs(rank))
        for region in shared_regions(
            target.names(rank), source, target, granularity, target_rank=rank
        )
    )


def shared_regions(
    names: Iterable[str],
    source: Layout,
    target: Layout,
    granularity: SplitGranularity = GRAIN,
    source_rank: int | None = None,
    target_rank: int | None = None,
) -> list[SharedRegion]:
    """The shared_regions of tensors `names` (only those that a given rank is part of), ordered alike on all ranks.

    Matrices that the target wants in FP8 are cut into whole blocks, whose scales go with them.
    """
    found: dict[tuple[Ranks, Ranks, str], list[BoxSpan]] = defaultdict(list)
    known: dict[tuple[Placement, Placement], list[tuple[Box, list[BoxSpan]]]] = {}
    for name in names:
        if travels_with_matrix(name, target):
            continue
        key = source.placement(name), target.placement(name)
        if key not in known:
            known[key] = [
                (box, found[sources, targets, dtype])
                for box, sources, targets, dtype in _spans(name, *key, source_rank, target_rank)
            ]
            if is_quantised(key[1]):
                check_scales(name, target)
        for box, spans in known[key]:
            spans.append((name, box.start, box.stop))
    return sorted(
        (SharedRegion(*key, spans, granularity) for key, spans in found.items() if spans),
        key=lambda region: region.sort_key,
    )


def _spans(
    name: str,
    source: Placement,
    target: Placement,
    source_rank: int | None,
    target_rank: int | None,
) -> Iterator[tuple[Box, Ranks, Ranks, str]]:
    """(box, sources, targets, dtype) of each piece that is wanted, cut where the sources change; only those
    that `source_rank` holds and `target_rank` wants, if given.
    """
    shape = shape_of(source, target) if is_quantised(target) else None
    if shape is not None:
        source, target = join_rows(source), join_rows(target)
    held = [
        (Box(name, piece.start, piece.stop), piece)
        for piece in source.pieces
        if source_rank is None or source_rank in piece.ranks
    ]
    for piece in target.pieces:
        if target_rank is not None and target_rank not in piece.ranks:
            continue
        wanted = Box(name, piece.start, piece.stop)
        missing = wanted.numel
        for box, holding in held:
            common = wanted.intersect(box)
            if common is not None:
                if shape is not None:
                    check_blocks(common, shape, holding, piece)
                missing -= common.numel
                yield common, holding.ranks, piece.ranks, piece.dtype
        if missing and source_rank is None:
            raise ValueError(
                f"target rank {piece.ranks[0]} needs {wanted}, but no source rank holds {missing} elements"
            )


def _flows(moves: Iterable[tuple[SharedRegion, Iterable[Move]]]) -> tuple[Flow, ...]:
    parts: dict[int, list[Sequence[Slice]]] = defaultdict(list)
    for region, pool_moves in moves:
        known: dict[tuple[int, int, int], tuple[Slice, ...]] = {}
        for peer, stretch in pool_moves:
            if stretch not in known:
                first, last, count = stretch
                known[stretch] = region.slices(region.cut(first, count), region.cut(last, count))
            if known[stretch]:
                parts[peer].append(known[stretch])
    return tuple(Flow(peer, tuple(map(tuple, parts[peer]))) for peer in sorted(parts))
