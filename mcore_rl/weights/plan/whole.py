"""Lists every transfer between two sides, given the shards of all ranks of both.

    source rank 0  rows 0-3  ----->  target rank 0  rows 0-3
    source rank 1  rows 4-7  --+-->  target rank 0  rows 4-5      one Transfer per arrow
                               +-->  target rank 1  rows 6-7

For few ranks: memory grows with the shards of all of them. local.py plans one rank at a time.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from mcore_rl.weights.box import Box, Shard, subtract
from mcore_rl.weights.layouts.listed import ListedLayout
from mcore_rl.weights.plan.local import plan_recvs
from mcore_rl.weights.plan.shares import RegularHosts


@dataclass(frozen=True)
class Transfer:
    """A box on its way from a shard of the source rank to a shard of the target rank.

    Both shards hold exactly this box. It travels in the target's dtype: the sender casts.
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
    """All transfers of a sync, ordered by source rank, target rank, HF name and position."""

    transfers: tuple[Transfer, ...]

    @cached_property
    def _by_source(self) -> dict[int, tuple[Transfer, ...]]:
        return _group(self.transfers, "source_rank")

    @cached_property
    def _by_target(self) -> dict[int, tuple[Transfer, ...]]:
        return _group(self.transfers, "target_rank")

    def sends(self, rank: int) -> tuple[Transfer, ...]:
        """Return the transfers out of source rank `rank`."""
        return self._by_source.get(rank, ())

    def recvs(self, rank: int) -> tuple[Transfer, ...]:
        """Return the transfers into target rank `rank`.

        Those from one source rank are in the order of that rank's `sends`.
        """
        return self._by_target.get(rank, ())


def make_plan(sources: Sequence[Sequence[Shard]], targets: Sequence[Sequence[Shard]]) -> SlicePlan:
    """Plan to fill every target shard from source shards.

    `sources[rank]` and `targets[rank]` are the shards that a rank holds. Every element of every
    target shard is sent exactly once, and the source ranks that hold it share the bytes. Raises
    ValueError naming a box of a target that no source holds.
    """
    source = ListedLayout(sources)
    target = ListedLayout(targets)
    # All sources on one host and all targets on another: every source takes a share.
    hosts = RegularHosts(max(1, len(sources)), max(1, len(targets)), 1)
    source_shards = [_by_name(shards) for shards in sources]
    transfers = []
    for rank, shards in enumerate(targets):
        target_shards = _by_name(shards)
        for flow in plan_recvs(rank, source, target, hosts):
            for piece in flow.slices:
                held = source_shards[flow.peer][piece.box.name]
                needed = target_shards[piece.box.name]
                transfers += _transfers(flow.peer, rank, piece.box, held, needed)
    transfers.sort(key=_order)
    return SlicePlan(tuple(transfers))


def _transfers(
    source_rank: int, target_rank: int, box: Box, held: Sequence[Shard], needed: Sequence[Shard]
) -> Iterator[Transfer]:
    """Yield the transfers of `box` from the source's shards to the target's."""
    for part in _parts(box, held):
        for shard in needed:
            common = part.box.intersect(shard.box)
            if common is not None:
                source, target = part.within(common), shard.within(common)
                yield Transfer(source_rank, target_rank, source, target)


def _by_name(shards: Sequence[Shard]) -> dict[str, list[Shard]]:
    names: dict[str, list[Shard]] = defaultdict(list)
    for shard in shards:
        names[shard.box.name].append(shard)
    return names


def _parts(box: Box, shards: Sequence[Shard]) -> Iterator[Shard]:
    """Yield parts of one rank's `shards` that together hold each element of `box` once."""
    missing = [box]
    for shard in sorted(shards, key=lambda shard: (shard.box.start, shard.tensor, shard.offset)):
        left: list[Box] = []
        for piece in missing:
            common = piece.intersect(shard.box)
            if common is not None:
                yield shard.within(common)
                left += subtract(piece, common)
            else:
                left.append(piece)
        missing = left
    assert not missing, f"the rank that is to send {missing[0]} does not hold it"


def _order(transfer: Transfer) -> tuple[object, ...]:
    target = transfer.target
    return (
        transfer.source_rank,
        transfer.target_rank,
        target.box.name,
        target.box.start,
        target.tensor,
        target.offset,
    )


def _group(transfers: Sequence[Transfer], rank: str) -> dict[int, tuple[Transfer, ...]]:
    groups: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        groups[getattr(transfer, rank)].append(transfer)
    return {key: tuple(members) for key, members in groups.items()}
