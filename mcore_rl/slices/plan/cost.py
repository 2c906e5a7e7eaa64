"""Two layouts and the hosts in, predicted bytes over each rank's link out; likewise of gather-and-broadcast.

Exact for the plans of `local_plan`, of which this is the sum, without any rank's list of boxes. Bytes between
ranks of one host do not count as network. Work grows with the model and the sets of ranks that share boxes.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from math import ceil, prod

from mcore_rl.slices.box import itemsize
from mcore_rl.slices.layouts.layout import Layout, Placement
from mcore_rl.slices.layouts.ranks import Ranks
from mcore_rl.slices.plan.local import GRAIN, shared_regions
from mcore_rl.slices.plan.shared_region import SharedRegion, SplitGranularity
from mcore_rl.slices.plan.shares import Shares, Topology

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
    """What a sync moves. Each rank has one link; `lower_bound` is what no plan can take the busiest below.

    No plan, that is, in which trainer ranks pass nothing on; engine ranks may, what they got.
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
    source: Layout,
    target: Layout,
    topology: Topology,
    granularity: SplitGranularity = GRAIN,
    engine_ranks: int | None = None,
) -> Traffic:
    """The traffic of one sync. ValueError names a box that no trainer rank holds.

    `engine_ranks`: the first so many engine ranks are an engine that passes on what it gets, rank by rank, to
    the next one of as many ranks, and so on; None: trainer ranks send to all.
    """
    trainer, engines = Load.zero(source.num_ranks), Load.zero(target.num_ranks)
    bounds = _Bounds(source.num_ranks, target.num_ranks, topology)
    for region in shared_regions(target.all_names(), source, target, granularity):
        served = [rank for rank in region.targets if engine_ranks is None or rank < engine_ranks]
        _count_sends(region, Shares(region.sources, served, topology), topology, trainer, engines)
        for rank in region.targets[len(served) :]:
            before = rank - (engine_ranks or 0)
            near = topology.target_host(before) == topology.target_host(rank)
            (engines.local_out if near else engines.network_out)[before] += region.num_bytes
            (engines.local_in if near else engines.network_in)[rank] += region.num_bytes
        bounds.add(region)
    return Traffic(trainer, engines, bounds.lowest)


class _Bounds:
    """What no plan can take the busiest link below in which trainer ranks send nothing but what they hold."""

    def __init__(self, num_sources: int, num_targets: int, topology: Topology) -> None:
        self._num_sources, self._topology = num_sources, topology
        self._target_ranks = Counter(map(topology.target_host, range(num_targets)))
        """Host -> engine ranks on it."""
        self._host_unique: Counter[int] = Counter()
        self._only_here: Counter[Ranks] = Counter()

    def add(self, region: SharedRegion) -> None:
        sources = {self._topology.source_host(rank) for rank in region.sources}
        far = {self._topology.target_host(rank) for rank in region.targets} - sources
        for host in far:
            self._host_unique[host] += region.num_bytes
        if far:
            self._only_here[region.sources] += region.num_bytes

    @property
    def lowest(self) -> int:
        bounds = [
            ceil(count / self._target_ranks[host]) for host, count in self._host_unique.items()
        ]
        bounds += [
            ceil(count / self._links_out(sources)) for sources, count in self._only_here.items()
        ]
        return max(
            (*bounds, ceil(self._only_here.total() / self._links_out(range(self._num_sources))))
        )

    def _links_out(self, sources: Collection[int]) -> int:
        """Of these trainer ranks and of the engine ranks beside them, which may pass on what they got."""
        hosts = {self._topology.source_host(rank) for rank in sources}
        return len(sources) + sum(self._target_ranks[host] for host in hosts)


def _count_sends(
    region: SharedRegion, shares: Shares, topology: Topology, trainer: Load, engines: Load
) -> None:
    for rank in region.sources:
        for peer, (first, last, count) in shares.sends(rank):
            num_bytes = region.bytes_before(region.cut(last, count)) - region.bytes_before(
                region.cut(first, count)
            )
            near = topology.source_host(rank) == topology.target_host(peer)
            (trainer.local_out if near else trainer.network_out)[rank] += num_bytes
            (engines.local_in if near else engines.network_in)[peer] += num_bytes


def predict_gather_broadcast(
    source: Layout, target: Layout, topology: Topology, stage_ranks: int
) -> GatherBroadcast:
    """`stage_ranks`: trainer ranks per pipeline stage, which follow one another."""
    counts = Counter(
        (source.placement(name), target.placement(name)) for name in target.all_names()
    )
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
