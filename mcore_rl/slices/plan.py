"""Shards of all source and target ranks in, who sends which box to whom out. Pure: same input, same plan."""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mcore_rl.slices.box import Box, Shard, subtract


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
    num_source_ranks: int
    num_target_ranks: int

    @cached_property
    def digest(self) -> str:
        """sha256 of the transfers: equal exactly if two plans move the same bytes between the same places."""
        lines = hashlib.sha256(f"{self.num_source_ranks} {self.num_target_ranks}".encode())
        for transfer in self.transfers:
            lines.update(_canonical(transfer).encode())
        return lines.hexdigest()

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

    @property
    def num_bytes(self) -> int:
        return sum(transfer.num_bytes for transfer in self.transfers)

    @property
    def bytes_per_source(self) -> tuple[int, ...]:
        return tuple(sum(t.num_bytes for t in self.sends(rank)) for rank in range(self.num_source_ranks))

    @property
    def bytes_per_target(self) -> tuple[int, ...]:
        return tuple(sum(t.num_bytes for t in self.recvs(rank)) for rank in range(self.num_target_ranks))

    @property
    def lower_bound_bytes(self) -> int:
        """Bytes that the busiest receiver needs, each box counted once: no plan takes it less."""
        return max(
            (
                sum({(t.box, t.target.dtype): t.num_bytes for t in self.recvs(rank)}.values())
                for rank in range(self.num_target_ranks)
            ),
            default=0,
        )


@dataclass(frozen=True)
class _Holder:
    rank: int
    shard: Shard


@dataclass(frozen=True)
class _Request:
    """`target` on `target_rank` can be filled by any of `holders`."""

    target_rank: int
    target: Shard
    holders: tuple[_Holder, ...] = field(repr=False)

    @property
    def sort_key(self) -> tuple[object, ...]:
        """The least choice first, then the most bytes: what is left can still even out the load."""
        target = self.target
        place = (target.box.name, target.box.start, self.target_rank, target.tensor, target.offset)
        return len(self.holders), -target.num_bytes, *place


def make_plan(sources: Sequence[Sequence[Shard]], targets: Sequence[Sequence[Shard]]) -> SlicePlan:
    """Fill every target shard from source shards; `sources[rank]` and `targets[rank]` are what rank has.

    Each element of each target shard is sent exactly once, by one of the source ranks that hold it: the one
    with the fewest bytes to send so far. ValueError names a target that no source holds.
    """
    holders = _index(sources)
    requests = [
        request
        for rank, shards in enumerate(targets)
        for shard in shards
        for request in _requests(rank, shard, holders.get(shard.box.name, {}))
    ]
    load = [0] * len(sources)
    transfers = []
    for request in sorted(requests, key=lambda request: request.sort_key):
        chosen = min(request.holders, key=lambda holder: (load[holder.rank], holder.rank))
        source = chosen.shard.within(request.target.box)
        transfer = Transfer(chosen.rank, request.target_rank, source, request.target)
        load[chosen.rank] += transfer.num_bytes
        transfers.append(transfer)
    transfers.sort(key=_order)
    return SlicePlan(tuple(transfers), len(sources), len(targets))


def _index(sources: Sequence[Sequence[Shard]]) -> dict[str, dict[Box, tuple[_Holder, ...]]]:
    """HF name -> box -> who holds it, at most one copy per rank."""
    index: dict[str, dict[Box, dict[int, _Holder]]] = defaultdict(lambda: defaultdict(dict))
    for rank, shards in enumerate(sources):
        for shard in shards:
            index[shard.box.name][shard.box].setdefault(rank, _Holder(rank, shard))
    return {
        name: {
            box: tuple(boxes[box].values()) for box in sorted(boxes, key=lambda box: (box.start, box.stop))
        }
        for name, boxes in index.items()
    }


def _requests(rank: int, target: Shard, holders: dict[Box, tuple[_Holder, ...]]) -> Iterator[_Request]:
    """The parts of `target`, one per source box that meets it."""
    missing = [target.box]
    for box, members in holders.items():
        if not missing:
            return
        left: list[Box] = []
        for piece in missing:
            common = piece.intersect(box)
            if common is None:
                left.append(piece)
                continue
            yield _Request(rank, target.within(common), members)
            left += subtract(piece, common)
        missing = left
    if missing:
        raise ValueError(
            f"target rank {rank}: {target.tensor!r} needs {missing[0]}, which no source rank holds"
        )


def _order(transfer: Transfer) -> tuple[object, ...]:
    box, target = transfer.target.box, transfer.target
    return transfer.source_rank, transfer.target_rank, box.name, box.start, target.tensor, target.offset


def _canonical(transfer: Transfer) -> str:
    sides = [(s.tensor, s.offset, s.strides, s.dtype) for s in (transfer.source, transfer.target)]
    box = transfer.box
    return repr((transfer.source_rank, transfer.target_rank, box.name, box.start, box.stop, sides))


def _group(transfers: Sequence[Transfer], rank: str) -> dict[int, tuple[Transfer, ...]]:
    groups: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        groups[getattr(transfer, rank)].append(transfer)
    return {key: tuple(members) for key, members in groups.items()}
