"""Computes one rank's own part of the plan from the two layouts.

    trainer layout   q_proj rows 0-3 on ranks 0 2, rows 4-7 on ranks 1 3
    engine layout    q_proj rows 0-7 on rank 0
    regions          {0, 2} -> {0}: rows 0-3              {1, 3} -> {0}: rows 4-7
    flows            rank 0 -> 0: rows 0-1                rank 1 -> 0: rows 4-5
                     rank 2 -> 0: rows 2-3                rank 3 -> 0: rows 6-7

Sender and receiver need no agreement: a rank holds or needs every box of the regions it is part of,
so both ends see the same regions, and they divide them by the same rule. Time and memory grow with
the boxes that the rank itself holds or needs, not with the number of ranks.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from mcore_rl.slices.box import Box
from mcore_rl.slices.layouts.layout import Layout, Placement
from mcore_rl.slices.layouts.quantized import (
    check_blocks,
    check_scales,
    is_quantized,
    join_rows,
    shape_of,
    travels_with_matrix,
)
from mcore_rl.slices.layouts.ranks import Ranks
from mcore_rl.slices.plan.shared_region import BoxSpan, SharedRegion, Slice, SplitGranularity
from mcore_rl.slices.plan.shares import Move, Shares, Stretch, Topology

DEFAULT_GRANULARITY = SplitGranularity()

PlacedBox = tuple[Box, Ranks, Ranks, str]
"""(box, sources that hold it, targets that need it, dtype it travels in)"""


@dataclass(frozen=True)
class Flow:
    """The slices that travel between this rank and `peer`, in order; equal on both ends."""

    peer: int
    parts: tuple[tuple[Slice, ...], ...]
    """The slices in order, grouped into tuples that the flows to several peers share."""

    @property
    def slices(self) -> Iterator[Slice]:
        return (piece for part in self.parts for piece in part)

    @cached_property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.slices)

    @cached_property
    def digest(self) -> str:
        """sha256 of the boxes and dtypes in order, by which the two ends compare their plans."""
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
    granularity: SplitGranularity = DEFAULT_GRANULARITY,
) -> tuple[Flow, ...]:
    """Return what trainer rank `rank` sends, one flow per engine rank, in their order."""
    names = source.names(rank)
    regions = shared_regions(names, source, target, granularity, source_rank=rank)
    return _flows(
        (region, Shares(region.sources, region.targets, topology).sends(rank)) for region in regions
    )


def plan_recvs(
    rank: int,
    source: Layout,
    target: Layout,
    topology: Topology,
    granularity: SplitGranularity = DEFAULT_GRANULARITY,
) -> tuple[Flow, ...]:
    """Return what engine rank `rank` receives, one flow per trainer rank, in their order.

    Raises ValueError naming a box that no trainer rank holds.
    """
    names = target.names(rank)
    regions = shared_regions(names, source, target, granularity, target_rank=rank)
    return _flows(
        (region, Shares(region.sources, region.targets, topology).recvs(rank)) for region in regions
    )


def shared_regions(
    names: Iterable[str],
    source: Layout,
    target: Layout,
    granularity: SplitGranularity = DEFAULT_GRANULARITY,
    source_rank: int | None = None,
    target_rank: int | None = None,
) -> list[SharedRegion]:
    """Return the regions of the tensors `names`, in an order that all ranks share.

    `source_rank` and `target_rank` restrict the result to the regions that the given rank is part
    of. Matrices that the target holds in FP8 are cut into whole blocks, whose scales travel with
    them.
    """
    spans_of: dict[tuple[Ranks, Ranks, str], list[BoxSpan]] = defaultdict(list)
    boxes_by_placement: dict[tuple[Placement, Placement], list[tuple[Box, list[BoxSpan]]]] = {}
    """Computed once per pair of placements, which many tensors share; their names don't matter."""
    for name in names:
        if travels_with_matrix(name, target):
            continue
        pair = source.placement(name), target.placement(name)
        if pair not in boxes_by_placement:
            placed = _placed_boxes(name, *pair, source_rank, target_rank)
            boxes_by_placement[pair] = [
                (box, spans_of[sources, targets, dtype]) for box, sources, targets, dtype in placed
            ]
            if is_quantized(pair[1]):
                check_scales(name, target)
        for box, spans in boxes_by_placement[pair]:
            spans.append((name, box.start, box.stop))
    regions = [SharedRegion(*key, spans, granularity) for key, spans in spans_of.items() if spans]
    return sorted(regions, key=lambda region: region.sort_key)


def _placed_boxes(
    name: str,
    source: Placement,
    target: Placement,
    source_rank: int | None,
    target_rank: int | None,
) -> Iterator[PlacedBox]:
    """Yield every piece that the target needs, cut where the sources change.

    `source_rank` and `target_rank` restrict the result to boxes that the given rank holds or needs.
    Raises ValueError if a needed element has no source, which is checked unless `source_rank` is
    given.
    """
    shape = shape_of(source, target) if is_quantized(target) else None
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
        needed = Box(name, piece.start, piece.stop)
        num_missing = needed.numel
        for box, holding in held:
            common = needed.intersect(box)
            if common is not None:
                if shape is not None:
                    check_blocks(common, shape, holding, piece)
                num_missing -= common.numel
                yield common, holding.ranks, piece.ranks, piece.dtype
        if num_missing and source_rank is None:
            raise ValueError(
                f"target rank {piece.ranks[0]} needs {needed}, but no source rank holds"
                f" {num_missing} elements"
            )


def _flows(moves: Iterable[tuple[SharedRegion, Iterable[Move]]]) -> tuple[Flow, ...]:
    """Return one flow per peer, in the order of the peers' ranks."""
    parts: dict[int, list[tuple[Slice, ...]]] = defaultdict(list)
    for region, region_moves in moves:
        slices_of: dict[Stretch, tuple[Slice, ...]] = {}
        for peer, stretch in region_moves:
            if stretch not in slices_of:
                first, last, count = stretch
                slices = region.slices(region.cut(first, count), region.cut(last, count))
                slices_of[stretch] = slices
            if slices_of[stretch]:
                parts[peer].append(slices_of[stretch])
    return tuple(Flow(peer, tuple(parts[peer])) for peer in sorted(parts))
