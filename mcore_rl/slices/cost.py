"""Two layouts and the hosts in, predicted bytes over each rank's link out; likewise of gather-and-broadcast.

Exact for the plans of `local_plan`, of which this is the sum, without any rank's list of boxes. Bytes between
ranks of one host do not count as network. Work grows with the model and the sets of ranks that share boxes.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, prod

from mcore_rl.slices.box import itemsize
from mcore_rl.slices.layouts.layout import Layout, Placement
from mcore_rl.slices.layouts.ranks import Ranks
from mcore_rl.slices.local_plan import GRAIN, pools
from mcore_rl.slices.pool import Grain, Pool
from mcore_rl.slices.shares import Shares, Topology

GATHER_BUCKET_BYTES = 512 << 20
"""slime's default for the bucket that a trainer rank fills with gathered tensors before it broadcasts it."""


@dataclass(frozen=True)
class Load:
    """Bytes per rank of one side, over the network and within the rank's own host."""

    network_in: list[int]
    network_out: list[int]
    local_in: list[int]
    local_out: list[int]

    @staticmethod
    def zero(num_ranks: int) -> "Load":
        return Load(*([0] * num_ranks for _ in range(4)))

    @property
    def busiest_link(self) -> int:
        """Bytes of the busiest direction of any rank's link; links are full duplex."""
        return max((*self.network_in, *self.network_out), default=0)


@dataclass(frozen=True)
class Traffic:
    """What a sync moves. Each rank has one link; `lower_bound` is what no plan can take the busiest below."""

    trainer: Load
    engines: Load
    lower_bound: int

    @property
    def network_bytes(self) -> int:
        return sum(self.trainer.network_out) + sum(self.engines.network_out)

    @property
    def busiest_link(self) -> int:
        return max(self.trainer.busiest_link, self.engines.busiest_link)

    def seconds(self, link_gbps: float) -> float:
        """Time of the busiest link, sends and relays overlapping; `link_gbps` in 10**9 bits per second."""
        return self.busiest_link * 8 / (link_gbps * 1e9)


@dataclass(frozen=True)
class GatherBroadcast:
    """The same update as slime does it: every trainer rank gathers its pipeline stage, one rank of each stage
    broadcasts it to all engine ranks, one stage after the other.

    gathered_in       bytes that each trainer rank gathers over the network (parts that a rank of its host has
                      are taken to come from there)
    model_bytes       what each engine rank takes in
    network_bytes     in all, the broadcast entering each engine host once
    """

    gathered_in: list[int]
    model_bytes: int
    network_bytes: int

    def seconds(self, link_gbps: float) -> float:
        """The gathers of all stages at once, then every byte through the link of a broadcasting rank."""
        return (max(self.gathered_in, default=0) + self.model_bytes) * 8 / (link_gbps * 1e9)


def predict(
    source: Layout, target: Layout, topology: Topology, grain: Grain = GRAIN, relay: bool = True
) -> Traffic:
    """The traffic of one sync. ValueError names a box that no trainer rank holds."""
    trainer, engines = Load.zero(source.num_ranks), Load.zero(target.num_ranks)
    host_unique: Counter[int] = Counter()
    only_here: Counter[Ranks] = Counter()
    once = 0
    for pool in pools(target.all_names(), source, target, grain):
        shares = Shares(pool.holders, pool.wanters, topology, relay)
        if not relay:
            _count_sends(pool, shares, topology, trainer, engines)
            continue
        _count_near(pool, shares, trainer, engines)
        _count_far(pool, shares, trainer, engines)
        for members in shares.far:
            host_unique[topology.target_host(members[0])] += pool.num_bytes
        if shares.far:
            once += pool.num_bytes
            only_here[pool.holders] += pool.num_bytes
    per_host = Counter(topology.target_host(rank) for rank in range(target.num_ranks))
    bounds = [ceil(count / per_host[host]) for host, count in host_unique.items()]
    bounds += [ceil(count / len(holders)) for holders, count in only_here.items()]
    bound = max((*bounds, ceil(once / source.num_ranks)))
    return Traffic(trainer, engines, bound)


def _count_near(pool: Pool, shares: Shares, trainer: Load, engines: Load) -> None:
    for holders, members in shares.near.values():
        _add_parts(pool, holders, trainer.local_out)
        brought = _add_parts(pool, members, engines.local_in)
        _count_spread(pool, members, brought, engines)


def _count_far(pool: Pool, shares: Shares, trainer: Load, engines: Load) -> None:
    num_hosts = len(shares.far)
    if not num_hosts:
        return
    _add_parts(pool, pool.holders, trainer.network_out)
    before = [pool.bytes_before(pool.cut(j, shares.num_stripes)) for j in range(shares.num_stripes + 1)]
    for host, members in enumerate(shares.far):
        brought = []
        for member, rank in enumerate(members):
            columns = shares.columns(len(members), member)
            first, past = columns.start * num_hosts, columns.stop * num_hosts
            own = sum(before[j + 1] - before[j] for j in range(first + host, past, num_hosts))
            engines.network_in[rank] += before[past] - before[first]
            engines.network_out[rank] += own * (num_hosts - 1)
            brought.append(before[past] - before[first])
        _count_spread(pool, members, brought, engines)


def _count_spread(pool: Pool, members: Sequence[int], brought: Sequence[int], engines: Load) -> None:
    for rank, count in zip(members, brought, strict=True):
        engines.local_in[rank] += pool.num_bytes - count
        engines.local_out[rank] += count * (len(members) - 1)


def _count_sends(pool: Pool, shares: Shares, topology: Topology, trainer: Load, engines: Load) -> None:
    """Without relays: from each holder to each wanter."""
    for rank in pool.holders:
        for peer, (first, last, count) in shares.sends(rank):
            num_bytes = pool.bytes_before(pool.cut(last, count)) - pool.bytes_before(pool.cut(first, count))
            near = topology.source_host(rank) == topology.target_host(peer)
            (trainer.local_out if near else trainer.network_out)[rank] += num_bytes
            (engines.local_in if near else engines.network_in)[peer] += num_bytes


def _add_parts(pool: Pool, ranks: Sequence[int], counts: list[int]) -> list[int]:
    """Add to each rank its equal part of the pool; the parts."""
    before = [pool.bytes_before(pool.cut(i, len(ranks))) for i in range(len(ranks) + 1)]
    parts = [b - a for a, b in pairwise(before)]
    for rank, part in zip(ranks, parts, strict=True):
        counts[rank] += part
    return parts


def predict_gather_broadcast(
    source: Layout, target: Layout, topology: Topology, stage_ranks: int
) -> GatherBroadcast:
    """`stage_ranks`: trainer ranks per pipeline stage, which follow one another."""
    counts = Counter((source.placement(name), target.placement(name)) for name in target.all_names())
    stage_bytes: Counter[int] = Counter()
    on_host: Counter[tuple[int, int]] = Counter()
    for (held, wanted), num_tensors in counts.items():
        size = itemsize(wanted.pieces[0].dtype) * num_tensors
        _count_stage(held, size, stage_ranks, topology.source_host, stage_bytes, on_host)
    gathered = [
        stage_bytes[rank // stage_ranks] - on_host[topology.source_host(rank), rank // stage_ranks]
        for rank in range(source.num_ranks)
    ]
    model_bytes = sum(
        num_tensors * itemsize(wanted.pieces[0].dtype) * _numel(wanted)
        for (_, wanted), num_tensors in counts.items()
    )
    engine_hosts = {topology.target_host(rank) for rank in range(target.num_ranks)}
    return GatherBroadcast(gathered, model_bytes, sum(gathered) + model_bytes * len(engine_hosts))


def _count_stage(
    held: Placement,
    size: int,
    stage_ranks: int,
    host_of: Callable[[int], int],
    stage_bytes: Counter[int],
    on_host: Counter[tuple[int, int]],
) -> None:
    """Add a placement's bytes to the stages that hold it, and to what each host of a stage has of it."""
    for piece in held.pieces:
        num_bytes = size * prod(b - a for a, b in zip(piece.start, piece.stop, strict=True))
        hosts = {(host_of(rank), rank // stage_ranks) for rank in piece.ranks}
        for stage in {stage for _, stage in hosts}:
            stage_bytes[stage] += num_bytes
        for host in hosts:
            on_host[host] += num_bytes


def _numel(placement: Placement) -> int:
    return sum(prod(b - a for a, b in zip(p.start, p.stop, strict=True)) for p in placement.pieces)


def by_host(counts: Iterable[int], host_of: Callable[[int], int]) -> dict[int, int]:
    """Bytes per rank in, bytes per host out."""
    hosts: dict[int, int] = defaultdict(int)
    for rank, count in enumerate(counts):
        hosts[host_of(rank)] += count
    return dict(hosts)
