"""Predicts the bytes that a sync sends over each rank's link, from two layouts and the hosts.

    host 0                                   host 1
    trainer rank 0 --local--> engine rank 0
    trainer rank 0 ---------network--------> engine rank 1

`predict` is exact for the plans of local.py: it adds up their flows without listing any rank's
boxes. Bytes between ranks of one host do not count as network. The work grows with the model and
with the number of regions. `predict_gather_broadcast` does the same for a sync by gather and
broadcast, for comparison.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from math import ceil, prod

from mcore_rl.weights.box import itemsize
from mcore_rl.weights.layouts.layout import Layout, Placement, Ranks
from mcore_rl.weights.plan.local import DEFAULT_GRANULARITY, find_shared_regions
from mcore_rl.weights.plan.shared_region import SharedRegion, SplitGranularity
from mcore_rl.weights.plan.shares import Shares, Topology

GATHER_BUCKET_BYTES = 512 << 20
"""slime's default size of the bucket of gathered tensors that a trainer rank broadcasts at once."""


@dataclass(frozen=True)
class Load:
    """Bytes per rank of one side: over the network, and between ranks of one host."""

    network_in: list[int]
    network_out: list[int]
    local_in: list[int]
    local_out: list[int]

    @staticmethod
    def zero(num_ranks: int) -> "Load":
        return Load(*([0] * num_ranks for _ in range(4)))

    @property
    def busiest_link(self) -> int:
        """Bytes over the busiest link in its busier direction; links are full duplex."""
        return max((*self.network_in, *self.network_out), default=0)


@dataclass(frozen=True)
class Traffic:
    """The bytes that a sync moves. Each rank has one link.

    lower_bound   bytes over the busiest link that no plan can go below, if trainer ranks send only
                  what they hold; engine ranks may relay what they received
    """

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
        """Return the seconds that the busiest link takes if sends and relays overlap.

        link_gbps   speed of a link in 10**9 bits per second
        """
        return self.busiest_link * 8 / (link_gbps * 1e9)


@dataclass(frozen=True)
class GatherBroadcast:
    """The same sync as slime does it, in bytes.

    Every trainer rank gathers its pipeline stage. Then one rank of each stage broadcasts it to all
    engine ranks, one stage after the other.

    gathered_in     bytes that each trainer rank gathers over the network; parts that a rank of its
                    own host holds are assumed to come from there
    model_bytes     bytes that each engine rank receives
    network_bytes   bytes over the network in all; the broadcast enters each engine host once
    """

    gathered_in: list[int]
    model_bytes: int
    network_bytes: int

    def seconds(self, link_gbps: float) -> float:
        """Return the seconds of all stages' gathers at once, then of every byte over one link.

        link_gbps   speed of a link in 10**9 bits per second
        """
        return (max(self.gathered_in, default=0) + self.model_bytes) * 8 / (link_gbps * 1e9)


def predict(
    source: Layout,
    target: Layout,
    topology: Topology,
    granularity: SplitGranularity = DEFAULT_GRANULARITY,
    engine_ranks: int | None = None,
) -> Traffic:
    """Return the traffic of one sync.

    engine_ranks   ranks of one engine, if engines relay: the trainer sends to the first engine
                   alone, and each engine rank passes on what it receives to the same rank of the
                   next engine. None: trainer ranks send to all engines

    Raises ValueError naming a box that no trainer rank holds.
    """
    trainer = Load.zero(source.num_ranks)
    engines = Load.zero(target.num_ranks)
    bound = _LowerBound(source.num_ranks, target.num_ranks, topology)
    for region in find_shared_regions(target.all_names(), source, target, granularity):
        direct = [rank for rank in region.targets if engine_ranks is None or rank < engine_ranks]
        _count_sends(region, Shares(region.sources, direct, topology), topology, trainer, engines)
        for rank in region.targets[len(direct) :]:
            relaying = rank - (engine_ranks or 0)
            is_local = topology.target_host(relaying) == topology.target_host(rank)
            (engines.local_out if is_local else engines.network_out)[relaying] += region.num_bytes
            (engines.local_in if is_local else engines.network_in)[rank] += region.num_bytes
        bound.add(region)
    return Traffic(trainer, engines, bound.num_bytes)


class _LowerBound:
    """Bytes over the busiest link that no plan can go below; see `Traffic`.

    Regions have to enter every host that needs them and holds none of them, over the links of that
    host, and have to leave the hosts of their sources, over the links of these.
    """

    def __init__(self, num_sources: int, num_targets: int, topology: Topology) -> None:
        self._num_sources = num_sources
        self._topology = topology
        self._target_ranks = Counter(map(topology.target_host, range(num_targets)))
        """Host -> engine ranks on it."""
        self._entering: Counter[int] = Counter()
        """Host -> bytes that have to enter it."""
        self._leaving: Counter[Ranks] = Counter()
        """Sources -> bytes that have to leave the hosts of these sources."""

    def add(self, region: SharedRegion) -> None:
        source_hosts = {self._topology.source_host(rank) for rank in region.sources}
        target_hosts = {self._topology.target_host(rank) for rank in region.targets}
        remote_hosts = target_hosts - source_hosts
        for host in remote_hosts:
            self._entering[host] += region.num_bytes
        if remote_hosts:
            self._leaving[region.sources] += region.num_bytes

    @property
    def num_bytes(self) -> int:
        bounds = [ceil(self._leaving.total() / self._links_out(range(self._num_sources)))]
        for host, num_bytes in self._entering.items():
            bounds.append(ceil(num_bytes / self._target_ranks[host]))
        for sources, num_bytes in self._leaving.items():
            bounds.append(ceil(num_bytes / self._links_out(sources)))
        return max(bounds)

    def _links_out(self, sources: Collection[int]) -> int:
        """Return the links of these trainer ranks and of the engine ranks on their hosts.

        These engine ranks may relay what they received within the host.
        """
        hosts = {self._topology.source_host(rank) for rank in sources}
        return len(sources) + sum(self._target_ranks[host] for host in hosts)


def _count_sends(
    region: SharedRegion, shares: Shares, topology: Topology, trainer: Load, engines: Load
) -> None:
    """Add what the sources of a region send to the loads of both sides."""
    for rank in region.sources:
        for peer, (first, last, count) in shares.sends(rank):
            begin = region.bytes_before(region.cut(first, count))
            num_bytes = region.bytes_before(region.cut(last, count)) - begin
            is_local = topology.source_host(rank) == topology.target_host(peer)
            (trainer.local_out if is_local else trainer.network_out)[rank] += num_bytes
            (engines.local_in if is_local else engines.network_in)[peer] += num_bytes


def predict_gather_broadcast(
    source: Layout, target: Layout, topology: Topology, stage_ranks: int
) -> GatherBroadcast:
    """Return the cost of the same sync by gather and broadcast.

    stage_ranks   trainer ranks of a pipeline stage; they have consecutive numbers
    """
    pairs = ((source.placement(name), target.placement(name)) for name in target.all_names())
    num_tensors_of = Counter(pairs)
    stage_bytes: Counter[int] = Counter()
    on_host: Counter[tuple[int, int]] = Counter()
    model_bytes = 0
    for (held, needed), num_tensors in num_tensors_of.items():
        size = itemsize(needed.pieces[0].dtype) * num_tensors
        model_bytes += size * _numel(needed)
        _count_stage(held, size, stage_ranks, topology.source_host, stage_bytes, on_host)
    gathered = []
    for rank in range(source.num_ranks):
        stage = rank // stage_ranks
        gathered.append(stage_bytes[stage] - on_host[topology.source_host(rank), stage])
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
    """Add a placement's bytes to its stages, and to what each host of a stage holds.

    size          bytes per element, times the tensors with this placement
    stage_bytes   stage -> bytes of its tensors
    on_host       (host, stage) -> bytes of the stage's tensors that ranks of the host hold
    """
    for piece in held.pieces:
        num_bytes = size * prod(b - a for a, b in zip(piece.start, piece.stop, strict=True))
        hosts = {(host_of(rank), rank // stage_ranks) for rank in piece.ranks}
        for stage in {stage for _, stage in hosts}:
            stage_bytes[stage] += num_bytes
        for host in hosts:
            on_host[host] += num_bytes


def _numel(placement: Placement) -> int:
    numel = 0
    for piece in placement.pieces:
        numel += prod(stop - start for start, stop in zip(piece.start, piece.stop, strict=True))
    return numel


def by_host(counts: Iterable[int], host_of: Callable[[int], int]) -> dict[int, int]:
    """Return host -> bytes, from the bytes of each rank."""
    hosts: dict[int, int] = defaultdict(int)
    for rank, num_bytes in enumerate(counts):
        hosts[host_of(rank)] += num_bytes
    return dict(hosts)


def count_exchanged_bytes(traffic: Traffic, hosts: Topology) -> tuple[int, int]:
    """Return the most bytes that a host's trainer ranks, and engine ranks, exchange with others."""
    trainers = by_host(traffic.trainer.network_out, hosts.source_host)
    received = by_host(traffic.engines.network_in, hosts.target_host)
    forwarded = by_host(traffic.engines.network_out, hosts.target_host)
    engines = [num + forwarded.get(host, 0) for host, num in received.items()]
    return max(trainers.values(), default=0), max(engines, default=0)
