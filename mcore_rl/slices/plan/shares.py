"""Holders and targets of a region in, who sends which stretch of it to whom out; each rank asks for its own.

Three sources and two targets on other hosts: every source sends as much as any other.

    region of target 0   0 --------------------------- 1      region of target 1   0 --------------------------- 1
    sent by            |       s0         |    s1    |                         |   s1    |        s2         |

A target on whose host a source runs takes all from the sources of that host, and no network is used.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from mcore_rl.slices.layouts.ranks import Ranks

Stretch = tuple[int, int, int]
"""(first, last, parts): from first / parts to last / parts of a region"""

Move = tuple[int, Stretch]
"""(peer's rank, stretch)"""


class Topology(Protocol):
    """Which host each rank runs on; hosts are numbered in common for both sides."""

    def source_host(self, rank: int) -> int: ...

    def target_host(self, rank: int) -> int: ...


@dataclass(frozen=True)
class RegularHosts:
    """Hosts of equal size, filled in the order of the ranks; engines begin at host `first_target_host`."""

    source_ranks_per_host: int
    target_ranks_per_host: int
    first_target_host: int

    def source_host(self, rank: int) -> int:
        return rank // self.source_ranks_per_host

    def target_host(self, rank: int) -> int:
        return self.first_target_host + rank // self.target_ranks_per_host


@dataclass(frozen=True)
class ListedHosts:
    """The host of every rank, one by one."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]

    def source_host(self, rank: int) -> int:
        return self.sources[rank]

    def target_host(self, rank: int) -> int:
        return self.targets[rank]


class Shares:
    """How a region is divided between its sources and its targets."""

    def __init__(self, sources: Ranks, targets: Sequence[int], topology: Topology) -> None:
        hosts = _by_host(sources, topology.source_host)
        self._groups: list[tuple[Sequence[int], Sequence[int]]] = []
        """(sources, targets): each of these targets takes all from these sources."""
        far: list[int] = []
        for host, members in _by_host(targets, topology.target_host).items():
            if host in hosts:
                self._groups.append((hosts[host], members))
            else:
                far += members
        self._groups.append((sources, sorted(far)))

    def sends(self, rank: int) -> Iterator[Move]:
        """What source `rank` sends to engine ranks."""
        for sources, targets in self._groups:
            i, num_sources = _place(sources, rank), len(sources)
            if i is None:
                continue
            for k, first, last in _overlaps(i, num_sources, len(targets)):
                yield targets[k], (first - k * num_sources, last - k * num_sources, num_sources)

    def recvs(self, rank: int) -> Iterator[Move]:
        """What target `rank` gets from trainer ranks."""
        for sources, targets in self._groups:
            k, num_sources = _place(targets, rank), len(sources)
            if k is None:
                continue
            for i, first, last in _overlaps(k, len(targets), num_sources):
                yield sources[i], (first - k * num_sources, last - k * num_sources, num_sources)


def _by_host(ranks: Iterable[int], host_of: Callable[[int], int]) -> dict[int, list[int]]:
    hosts: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        hosts[host_of(rank)].append(rank)
    return hosts


def _place(ranks: Sequence[int], rank: int) -> int | None:
    if isinstance(ranks, Ranks):
        return ranks.find(rank)
    return ranks.index(rank) if rank in ranks else None


def _overlaps(i: int, n: int, m: int) -> Iterator[tuple[int, int, int]]:
    """The m-ths that meet the i-th of n: (k, first, last), where they do, in units of 1 / (n * m)."""
    for k in range(i * m // n, -(-(i + 1) * m // n)):
        yield k, max(i * m, k * n), min((i + 1) * m, (k + 1) * n)
