"""Decides which source of a region sends which stretch of it to which target.

Every target needs the whole region. Three sources feed two targets on other hosts, and each source
sends 2/3 of a region:

    target 0   0 |====== source 0 ======|= source 1 =| 1
    target 1   0 |= source 1 =|====== source 2 ======| 1

A target with sources on its own host takes everything from these, so that no network is used. Each
rank computes only its own moves, and both ends of a move compute the same stretch.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mcore_rl.weights.layouts.layout import Ranks

Stretch = tuple[int, int, int]
"""(first, last, parts): the part of a region from first / parts to last / parts of its bytes"""

Move = tuple[int, Stretch]
"""(rank of the peer, stretch that travels)"""


@dataclass(frozen=True)
class Dealt:
    """A region in stretches from successive sources: number `first + i` of `sources` sends what
    lies between edges[i] / parts and edges[i + 1] / parts of its bytes.
    """

    sources: Sequence[int]
    first: int
    edges: NDArray[np.int64]
    parts: int


class Topology(Protocol):
    """The host that each rank runs on. Both sides number the hosts alike."""

    def source_host(self, rank: int) -> int: ...

    def target_host(self, rank: int) -> int: ...

    def sources_on(self, host: int) -> Sequence[int]:
        """Return the source ranks on a host, ascending."""
        ...


@dataclass(frozen=True)
class RegularHosts:
    """Hosts of equal size, filled in the order of the ranks.

    Source rank 0 runs on host 0, target rank 0 on host `first_target_host`.
    """

    source_ranks_per_host: int
    target_ranks_per_host: int
    first_target_host: int

    def source_host(self, rank: int) -> int:
        return rank // self.source_ranks_per_host

    def target_host(self, rank: int) -> int:
        return self.first_target_host + rank // self.target_ranks_per_host

    def sources_on(self, host: int) -> Sequence[int]:
        first = host * self.source_ranks_per_host
        return range(first, first + self.source_ranks_per_host)


@dataclass(frozen=True)
class ListedHosts:
    """The host of every rank, listed by rank."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]

    def source_host(self, rank: int) -> int:
        return self.sources[rank]

    def target_host(self, rank: int) -> int:
        return self.targets[rank]

    def sources_on(self, host: int) -> Sequence[int]:
        return self._sources_by_host[host] if host in self._source_hosts else ()

    @cached_property
    def _source_hosts(self) -> frozenset[int]:
        return frozenset(self.sources)

    @cached_property
    def _sources_by_host(self) -> dict[int, list[int]]:
        return _by_host(range(len(self.sources)), self.source_host)


class Shares:
    """How a region is divided between its sources and its targets."""

    def __init__(self, sources: Ranks, targets: Sequence[int], topology: Topology) -> None:
        # Never goes through all sources: a tensor may have thousands of replicas.
        self._groups: list[tuple[Sequence[int], Sequence[int]]] = []
        """(sources, targets): each of these targets takes the whole region from these sources."""
        remote_targets: list[int] = []
        for host, members in _by_host(targets, topology.target_host).items():
            near = [rank for rank in topology.sources_on(host) if _index(sources, rank) is not None]
            if near:
                self._groups.append((near, members))
            else:
                remote_targets += members
        self._groups.append((sources, sorted(remote_targets)))

    def sends(self, rank: int) -> Iterator[Move]:
        """Yield what source `rank` sends, and to which targets."""
        for sources, targets in self._groups:
            num_sources = len(sources)
            source = _index(sources, rank)
            if source is None:
                continue
            for target, first, last in _overlaps(source, num_sources, len(targets)):
                before = target * num_sources
                yield targets[target], (first - before, last - before, num_sources)

    def recvs(self, rank: int) -> Iterator[Dealt]:
        """Yield what target `rank` receives, and from which sources."""
        for sources, targets in self._groups:
            num_sources = len(sources)
            target = _index(targets, rank)
            if target is None:
                continue
            num_targets = len(targets)
            first, last = _find_overlapping(target, num_targets, num_sources)
            edges = np.arange(first, last + 1) * num_targets - target * num_sources
            yield Dealt(sources, first, edges.clip(0, num_sources), num_sources)


def _by_host(ranks: Iterable[int], host_of: Callable[[int], int]) -> dict[int, list[int]]:
    """Return host -> its ranks."""
    hosts: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        hosts[host_of(rank)].append(rank)
    return hosts


def _index(ranks: Sequence[int], rank: int) -> int | None:
    """Return the position of `rank` in `ranks`, or None if it is not one of them."""
    if isinstance(ranks, Ranks):
        return ranks.find(rank)
    return ranks.index(rank) if rank in ranks else None


def _find_overlapping(i: int, n: int, m: int) -> tuple[int, int]:
    """Return the range of those of m equal parts of [0, 1) that overlap part i of n."""
    return i * m // n, -(-(i + 1) * m // n)


def _overlaps(i: int, n: int, m: int) -> Iterator[tuple[int, int, int]]:
    """Cut [0, 1) into n and into m equal parts, and yield the m-ths that overlap part i of n.

    Each is (k, first, last): part k of m overlaps from first / (n * m) to last / (n * m).
    """
    for k in range(*_find_overlapping(i, n, m)):
        yield k, max(i * m, k * n), min((i + 1) * m, (k + 1) * n)
