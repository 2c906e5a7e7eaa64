"""Holders and wanters of a pool in, who moves which stretch of it to whom out; each rank asks for its own.

Two engine hosts of two ranks that want the same; the trainer sends one copy, the hosts complete each other's.

    pool      0 ------------------------------------ 1
    trainer   |        s0        |        s1         |   send:   an equal stretch each
    column    |     member 0     |     member 1      |   what a member brings to its host
    stripe    | host 0 | host 1  | host 0 |  host 1  |   relay:  host 0's stripes go on to host 1, and back
                                                         spread: members give their column to their neighbours

An engine host on which a holder runs takes all from that holder, and no network is used.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from mcore_rl.slices.layouts.ranks import Ranks

Stretch = tuple[int, int, int]
"""(first, last, parts): from first / parts to last / parts of a pool"""

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
    """How a pool is divided between its holders and its wanters."""

    def __init__(self, holders: Ranks, wanters: Ranks, topology: Topology, relay: bool = True) -> None:
        """Without `relay` each wanter is sent all that it wants by the holders themselves."""
        self._holders, self._wanters, self._topology, self._relay = holders, wanters, topology, relay
        self.near: dict[int, tuple[list[int], list[int]]] = {}
        self.far: list[list[int]] = []
        if not relay:
            return
        sources = _by_host(holders, topology.source_host)
        for host, members in _by_host(wanters, topology.target_host).items():
            if host in sources:
                self.near[host] = sources[host], members
            else:
                self.far.append(members)
        self.num_columns = max(map(len, self.far), default=0)
        self.num_stripes = self.num_columns * len(self.far)

    def sends(self, rank: int) -> Iterator[Move]:
        """What holder `rank` sends to engine ranks."""
        i = _place(self._holders, rank)
        num_holders = len(self._holders)
        if not self._relay:
            for k, first, last in _overlaps(i, num_holders, len(self._wanters)):
                yield self._wanters[k], (first - k * num_holders, last - k * num_holders, num_holders)
            return
        if self.far:
            for j, first, last in _overlaps(i, num_holders, self.num_stripes):
                column, host = divmod(j, len(self.far))
                yield self.porter(host, column), (first, last, num_holders * self.num_stripes)
        host = self._topology.source_host(rank)
        if host in self.near:
            holders, members = self.near[host]
            for k, first, last in _overlaps(holders.index(rank), len(holders), len(members)):
                yield members[k], (first, last, len(holders) * len(members))

    def recvs(self, rank: int) -> Iterator[Move]:
        """What wanter `rank` gets from trainer ranks."""
        num_holders = len(self._holders)
        if not self._relay:
            k = _place(self._wanters, rank)
            for i, first, last in _overlaps(k, len(self._wanters), num_holders):
                yield self._holders[i], (first - k * num_holders, last - k * num_holders, num_holders)
            return
        host, members, member = self._seat(rank)
        if host is None:
            holders, _ = self.near[self._topology.target_host(rank)]
            for i, first, last in _overlaps(member, len(members), len(holders)):
                yield holders[i], (first, last, len(holders) * len(members))
            return
        for column in self.columns(len(members), member):
            for i, first, last in _overlaps(column * len(self.far) + host, self.num_stripes, num_holders):
                yield self._holders[i], (first, last, num_holders * self.num_stripes)

    def relay_sends(self, rank: int) -> Iterator[Move]:
        """What wanter `rank` passes on to other hosts."""
        host, members, member = self._seat(rank)
        if host is not None:
            for column in self.columns(len(members), member):
                j = column * len(self.far) + host
                for other in range(len(self.far)):
                    if other != host:
                        yield self.porter(other, column), (j, j + 1, self.num_stripes)

    def relay_recvs(self, rank: int) -> Iterator[Move]:
        """What wanter `rank` gets from other hosts."""
        host, members, member = self._seat(rank)
        if host is not None:
            for column in self.columns(len(members), member):
                for other in range(len(self.far)):
                    j = column * len(self.far) + other
                    if other != host:
                        yield self.porter(other, column), (j, j + 1, self.num_stripes)

    def spread_sends(self, rank: int) -> Iterator[Move]:
        """What wanter `rank` gives to its neighbours on the same host."""
        host, members, member = self._seat(rank)
        own = self._brought(host, len(members), member)
        return ((neighbour, own) for neighbour in members if neighbour != rank)

    def spread_recvs(self, rank: int) -> Iterator[Move]:
        """What wanter `rank` gets from its neighbours on the same host."""
        host, members, _ = self._seat(rank)
        for member, neighbour in enumerate(members):
            if neighbour != rank:
                yield neighbour, self._brought(host, len(members), member)

    def porter(self, host: int, column: int) -> int:
        """The member of far host number `host` that brings `column` to it."""
        members = self.far[host]
        return members[column * len(members) // self.num_columns]

    def columns(self, num_members: int, member: int) -> range:
        """The columns that a member of a far host brings to it."""
        return range(
            -(-member * self.num_columns // num_members), -(-(member + 1) * self.num_columns // num_members)
        )

    def _brought(self, host: int | None, num_members: int, member: int) -> Stretch:
        if host is None:
            return member, member + 1, num_members
        columns = self.columns(num_members, member)
        return columns.start, columns.stop, self.num_columns

    def _seat(self, rank: int) -> tuple[int | None, list[int], int]:
        """(number of the far host or None, members of the wanter's host, its place among them)."""
        if not self._relay:
            return None, [rank], 0
        host = self._topology.target_host(rank)
        if host in self.near:
            members = self.near[host][1]
            return None, members, members.index(rank)
        for number, members in enumerate(self.far):
            if self._topology.target_host(members[0]) == host:
                return number, members, members.index(rank)
        raise AssertionError(f"engine rank {rank} is not among {self._wanters}")


def _by_host(ranks: Ranks, host_of: Callable[[int], int]) -> dict[int, list[int]]:
    hosts: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        hosts[host_of(rank)].append(rank)
    return hosts


def _place(ranks: Ranks, rank: int) -> int:
    i = ranks.find(rank)
    assert i is not None, f"rank {rank} is not among {ranks}"
    return i


def _overlaps(i: int, n: int, m: int) -> Iterator[tuple[int, int, int]]:
    """The m-ths that meet the i-th of n: (k, first, last), where they do, in units of 1 / (n * m)."""
    for k in range(i * m // n, -(-(i + 1) * m // n)):
        yield k, max(i * m, k * n), min((i + 1) * m, (k + 1) * n)
