"""Shards of all ranks of both sides in, every transfer between them out; for few ranks."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from mcore_rl.slices.box import Box, Shard, subtract
from mcore_rl.slices.layouts.listed import ListedLayout
from mcore_rl.slices.plan.local import plan_recvs
from mcore_rl.slices.plan.shares import RegularHosts


@dataclass(frozen=True)
class Transfer:
    """One box, from `source` on one rank to `target` on another (both hold exactly that box).

    It travels in the dtype of the target: the sender casts.
    """

    source_rank: int
    target_rank: int
    source: Shard
    target: Shard

    @property
    def box(self) -> Box:
        return self.target.box

    @property
    def num_bytes(self) -> int:
        return self.target.num_bytes


@dataclass(frozen=True)
class SlicePlan:
    """All transfers, ordered by source rank, target rank, HF name and place; ranks count from 0."""

    transfers: tuple[Transfer, ...]

    @cached_property
    def _by_source(self) -> dict[int, tuple[Transfer, ...]]:
        return _group(self.transfers, "source_rank")

    @cached_property
    def _by_target(self) -> dict[int, tuple[Transfer, ...]]:
        return _group(self.transfers, "target_rank")

    def sends(self, rank: int) -> tuple[Transfer, ...]:
        """Transfers out of source rank `rank`."""
        return self._by_source.get(rank, ())

    def recvs(self, rank: int) -> tuple[Transfer, ...]:
        """Transfers into target rank `rank`; those of one source rank are in the order of its `sends`."""
        return self._by_target.get(rank, ())


def make_plan(sources: Sequence[Sequence[Shard]], targets: Sequence[Sequence[Shard]]) -> SlicePlan:
    """Fill every target shard from source shards; `sources[rank]` and `targets[rank]` are what rank has.

    The local plans of all target ranks, each box where it lies on both sides: each element of each target
    shard is sent exactly once, and the source ranks that hold it share the bytes. ValueError names a target
    that no source holds.
    """
    source, target = ListedLayout(sources), ListedLayout(targets)
    hosts = RegularHosts(max(1, len(sources)), max(1, len(targets)), 1)
    held = [_by_name(shards) for shards in sources]
    transfers = []
    for rank, shards in enumerate(targets):
        wanted = _by_name(shards)
        for flow in plan_recvs(rank, source, target, hosts):
            for piece in flow.slices:
                parts = _parts(piece.box, held[flow.peer][piece.box.name])
                transfers += [
                    Transfer(flow.peer, rank, part.within(common), shard.within(common))
                    for part in parts
                    for shard in wanted[piece.box.name]
                    if (common := part.box.intersect(shard.box))
                ]
    transfers.sort(key=_order)
    return SlicePlan(tuple(transfers))


def _by_name(shards: Sequence[Shard]) -> dict[str, list[Shard]]:
    names: dict[str, list[Shard]] = defaultdict(list)
    for shard in shards:
        names[shard.box.name].append(shard)
    return names


def _parts(box: Box, shards: Sequence[Shard]) -> Iterator[Shard]:
    """The parts of one rank's `shards` that make up `box`, each element once."""
    missing = [box]
    for shard in sorted(shards, key=lambda shard: (shard.box.start, shard.tensor, shard.offset)):
        left: list[Box] = []
        for piece in missing:
            common = piece.intersect(shard.box)
            if common is not None:
                yield shard.within(common)
            left += [piece] if common is None else subtract(piece, common)
        missing = left
    assert not missing, f"{missing[0]} is not among the shards of the rank that is to send it"


def _order(transfer: Transfer) -> tuple[object, ...]:
    box, target = transfer.target.box, transfer.target
    return (
        transfer.source_rank,
        transfer.target_rank,
        box.name,
        box.start,
        target.tensor,
        target.offset,
    )


def _group(transfers: Sequence[Transfer], rank: str) -> dict[int, tuple[Transfer, ...]]:
    groups: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        groups[getattr(transfer, rank)].append(transfer)
    return {key: tuple(members) for key, members in groups.items()}
