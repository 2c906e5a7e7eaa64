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

import numpy as np

from mcore_rl.weights.box import Box, Shape, count_elements, find_common
from mcore_rl.weights.layouts.layout import Layout, Placement, Ranks
from mcore_rl.weights.layouts.listed import (
    check_blocks,
    check_scales,
    find_shape,
    is_quantized,
    join_rows,
    travels_with_matrix,
)
from mcore_rl.weights.plan.shared_region import BoxSpan, SharedRegion, Slice, SplitGranularity
from mcore_rl.weights.plan.shares import Shares, Stretch, Topology

DEFAULT_GRANULARITY = SplitGranularity()

PlacedBox = tuple[Shape, Shape, Ranks, Ranks, str]
"""(start, stop, sources that hold it, targets that need it, dtype it travels in)"""
Part = tuple[int, tuple[Slice, ...]]
"""(peer, slices of one region that travel between it and the rank)"""


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
    regions = find_shared_regions(names, source, target, granularity, source_rank=rank)
    return _flows(sent for region in regions for sent in _sends(region, rank, topology))


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
    regions = find_shared_regions(names, source, target, granularity, target_rank=rank)
    return _flows(received for region in regions for received in _recvs(region, rank, topology))


def find_shared_regions(
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
    placed: dict[tuple[Placement, Placement], list[tuple[Shape, Shape, list[BoxSpan]]]] = {}
    """Computed once per pair of placements, which many tensors share; their names don't matter."""
    for name in names:
        if travels_with_matrix(name, target):
            continue
        pair = source.placement(name), target.placement(name)
        if pair not in placed:
            placed[pair] = [
                (start, stop, spans_of[sources, targets, dtype])
                for start, stop, sources, targets, dtype in _place_boxes(
                    name, *pair, source_rank, target_rank
                )
            ]
            if is_quantized(pair[1]):
                check_scales(name, target)
        for start, stop, spans in placed[pair]:
            spans.append((name, start, stop))
    regions = [SharedRegion(*key, spans, granularity) for key, spans in spans_of.items() if spans]
    return sorted(regions, key=lambda region: region.sort_key)


def _place_boxes(
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
    shape = find_shape(source, target) if is_quantized(target) else None
    if shape is not None:
        source, target = join_rows(source), join_rows(target)
    held = [piece for piece in source.pieces if source_rank is None or source_rank in piece.ranks]
    for piece in target.pieces:
        if target_rank is not None and target_rank not in piece.ranks:
            continue
        num_missing = count_elements(piece.start, piece.stop) if source_rank is None else 0
        for holding in held:
            common = find_common(piece.start, piece.stop, holding.start, holding.stop)
            if common is not None:
                if shape is not None:
                    check_blocks(Box(name, *common), shape, holding, piece)
                if source_rank is None:
                    num_missing -= count_elements(*common)
                yield *common, holding.ranks, piece.ranks, piece.dtype
        if num_missing:
            raise ValueError(
                f"target rank {piece.ranks[0]} needs {Box(name, piece.start, piece.stop)}, but no"
                f" source rank holds {num_missing} elements"
            )


def _sends(region: SharedRegion, rank: int, topology: Topology) -> Iterator[Part]:
    """Yield what source `rank` sends of a region."""
    slices_of: dict[Stretch, tuple[Slice, ...]] = {}
    for peer, stretch in Shares(region.sources, region.targets, topology).sends(rank):
        if stretch not in slices_of:
            first, last, count = stretch
            slices_of[stretch] = region.slices(region.cut(first, count), region.cut(last, count))
        if slices_of[stretch]:
            yield peer, slices_of[stretch]


def _recvs(region: SharedRegion, rank: int, topology: Topology) -> Iterator[Part]:
    """Yield what target `rank` receives of a region.

    Most of thousands of replicas send nothing of a small region: their cuts are equal.
    """
    for dealt in Shares(region.sources, region.targets, topology).recvs(rank):
        cuts = region.cut_all(dealt.edges, dealt.parts)
        for i in np.flatnonzero((cuts[1:] != cuts[:-1]).any(axis=1)).tolist():
            begin, end = map(tuple, cuts[i : i + 2].tolist())
            yield dealt.sources[dealt.first + i], region.slices(begin, end)


def _flows(moved: Iterable[Part]) -> tuple[Flow, ...]:
    """Return one flow per peer, in the order of the peers' ranks."""
    parts: dict[int, list[tuple[Slice, ...]]] = defaultdict(list)
    for peer, slices in moved:
        parts[peer].append(slices)
    return tuple(Flow(peer, tuple(parts[peer])) for peer in sorted(parts))
