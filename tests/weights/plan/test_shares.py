"""Shares of a region: both ends agree, each target gets all of it, and sources send alike."""

from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.weights.layouts.layout import Ranks
from mcore_rl.weights.plan.shares import (
    ListedHosts,
    Move,
    RegularHosts,
    Shares,
    Stretch,
    Topology,
)

Sent = dict[tuple[int, int], list[Stretch]]


def sends(sources: Ranks, targets: list[int], topology: Topology) -> Sent:
    """(source, target) -> stretches, as the sources see them."""
    shares = Shares(sources, targets, topology)
    moves: Sent = defaultdict(list)
    for source in sources:
        for target, stretch in shares.sends(source):
            moves[source, target].append(stretch)
    return moves


def recvs_of(shares: Shares, target: int) -> Iterator[Move]:
    """Yield (source, stretch) of what a target receives."""
    for dealt in shares.recvs(target):
        for i, (first, last) in enumerate(pairwise(dealt.edges.tolist())):
            yield dealt.sources[dealt.first + i], (first, last, dealt.parts)


def recvs(sources: Ranks, targets: list[int], topology: Topology) -> Sent:
    """(source, target) -> stretches, as the targets see them."""
    shares = Shares(sources, targets, topology)
    moves: Sent = defaultdict(list)
    for target in targets:
        for source, stretch in recvs_of(shares, target):
            moves[source, target].append(stretch)
    return moves


def test_three_sources_of_two_remote_targets_send_two_thirds_each() -> None:
    moves = sends(Ranks.from_iterable([0, 1, 2]), [0, 1], RegularHosts(8, 8, 1))
    assert moves == {
        (0, 0): [(0, 2, 3)],
        (1, 0): [(2, 3, 3)],
        (1, 1): [(0, 1, 3)],
        (2, 1): [(1, 3, 3)],
    }


def test_targets_take_all_from_sources_on_their_own_host() -> None:
    topology = ListedHosts(sources=(0, 0, 1), targets=(0, 2))
    moves = sends(Ranks.from_iterable([0, 1, 2]), [0, 1], topology)
    assert {source for source, target in moves if target == 0} == {0, 1}
    assert {source for source, target in moves if target == 1} == {0, 1, 2}


@given(st.data())
def test_both_ends_agree_and_every_target_gets_the_whole_region_once(data: st.DataObject) -> None:
    hosts = st.integers(0, 3)
    topology = ListedHosts(
        tuple(data.draw(st.lists(hosts, min_size=1, max_size=6))),
        tuple(data.draw(st.lists(hosts, min_size=1, max_size=6))),
    )
    sources = Ranks.from_iterable(range(len(topology.sources)))
    targets = list(range(len(topology.targets)))
    moves = sends(sources, targets, topology)
    assert moves == recvs(sources, targets, topology)
    for target in targets:
        stretches = sorted(
            (Fraction(first, parts), Fraction(last, parts))
            for (_, receiver), sent in moves.items()
            if receiver == target
            for first, last, parts in sent
        )
        begins, ends = zip(*stretches, strict=True)
        assert begins == (0, *ends[:-1])
        assert ends[-1] == 1


@given(st.integers(1, 9), st.integers(1, 9))
def test_sources_without_local_targets_send_the_same_amount(
    num_sources: int, num_targets: int
) -> None:
    moves = sends(
        Ranks.from_iterable(range(num_sources)), list(range(num_targets)), RegularHosts(9, 9, 1)
    )
    sent: dict[int, Fraction] = defaultdict(Fraction)
    for (source, _), stretches in moves.items():
        for first, last, parts in stretches:
            sent[source] += Fraction(last - first, parts)
    assert set(sent.values()) == {Fraction(num_targets, num_sources)}


@pytest.mark.parametrize(("rank", "source", "target"), [(0, 0, 2), (7, 0, 3), (8, 1, 4)])
def test_regular_hosts_are_filled_in_the_order_of_the_ranks(
    rank: int, source: int, target: int
) -> None:
    hosts = RegularHosts(source_ranks_per_host=8, target_ranks_per_host=4, first_target_host=2)
    assert hosts.source_host(rank) == source
    assert hosts.target_host(rank) == target


class _Unlisted(Ranks):
    """Ranks of which nobody may go through all."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("went through all ranks")


@pytest.mark.parametrize(("target", "stretch"), [(0, (0, 4, 4)), (4, (0, 2, 1000))])
def test_a_rank_does_not_go_through_the_replicas_of_a_slice(
    target: int, stretch: tuple[int, int, int]
) -> None:
    # Targets 0-3 are on host 1 with sources 4-7, targets 4 and 5 on a host without sources.
    sources = _Unlisted(Ranks.grid(0, (1000, 1)).grids)
    hosts = ListedHosts(tuple(rank // 4 for rank in range(1000)), (1, 1, 1, 1, 300, 300))
    shares = Shares(sources, range(6), hosts)
    peer, first = next(recvs_of(shares, target))
    assert (peer, first) == (4 if target == 0 else 0, stretch)
    assert (target, first) in shares.sends(peer)
