"""Copies of states lie on two nodes again after a recovery; a keeper that dies is replaced."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

import pytest

from mcore_rl.cluster.answers import RankLostError
from mcore_rl.cluster.state_keepers import StateKeepers
from mcore_rl.process.kept_copies import Header
from mcore_rl.process.kept_memory import HEADER_BYTES, map_kept
from tests.support.local_keepers import LocalNodes, open_keepers

NUM_BYTES = 2 * HEADER_BYTES


@pytest.fixture
def nodes() -> Iterator[LocalNodes]:
    with closing(LocalNodes("ABC")) as made:
        yield made


@pytest.fixture
def keepers(nodes: LocalNodes, monkeypatch: pytest.MonkeyPatch) -> StateKeepers:
    return open_keepers(nodes, monkeypatch, "ABC")


def keep(keepers: StateKeepers, paths: Mapping[str, Sequence[str]], step: int) -> None:
    """Write a copy as each rank does, and mirror it."""
    k = step % 2
    header = Header(step, 0, NUM_BYTES, "", 0, NUM_BYTES).encode()
    for pieces in paths.values():
        with map_kept(pieces[k]) as piece:
            piece[: len(header)] = header
    keepers.mirror(dict.fromkeys(paths, k))
    keepers.settle()


def list_steps(keepers: StateKeepers, node: str, name: str) -> list[int]:
    """Return the steps of the copies of a rank that lie on a node."""
    headers = [keepers._read_header(node, f"{name}_{k}") for k in range(2)]
    return sorted(header.step for header in headers if header is not None)


def test_ranks_that_moved_to_their_partner_are_copied_elsewhere(
    nodes: LocalNodes, keepers: StateKeepers
) -> None:
    paths = keepers.reserve({"r0": NUM_BYTES, "r1": NUM_BYTES}, {"r0": "A", "r1": "B"})
    for step in (4, 5):
        keep(keepers, paths, step)
    nodes.lose("A")
    keepers.find({"r0": "B", "r1": "B"})
    keepers.renew()
    keepers.settle()
    for name in ("r0", "r1"):
        assert list_steps(keepers, "B", name) == [4, 5]
        assert list_steps(keepers, "C", name) == [4, 5]


def test_a_keeper_that_dies_on_a_node_that_lives_is_replaced_at_the_next_keep(
    nodes: LocalNodes, keepers: StateKeepers, caplog: pytest.LogCaptureFixture
) -> None:
    paths = keepers.reserve({"r0": NUM_BYTES, "r1": NUM_BYTES}, {"r0": "A", "r1": "B"})
    for step in (3, 4):
        keep(keepers, paths, step)
    assert keepers.reserve_lost(["r0", "r1"]) == {}
    nodes.actors["B"].die()
    keep(keepers, {"r0": paths["r0"]}, 5)
    assert "the keeper of the states on node host-B died" in caplog.text
    assert keepers.reserve_lost(["r0"]) == {}, "its own node's lives"
    new = keepers.reserve_lost(["r0", "r1"])
    assert keepers.reserve_lost(["r0", "r1"]) == {}
    for step in (6, 7):
        keep(keepers, new, step)
    assert new["r0"] == paths["r0"] and nodes.num_started == 3
    for name in ("r0", "r1"):
        for node in "AB":
            assert list_steps(keepers, node, name) == [6, 7]
    assert caplog.text.count("died") == 1


def test_the_death_of_the_only_keeper_shows_without_a_partner(
    nodes: LocalNodes, keepers: StateKeepers, caplog: pytest.LogCaptureFixture
) -> None:
    for lost in "BC":
        nodes.start(lost)
        nodes.lose(lost)
    paths = keepers.reserve({"r0": NUM_BYTES}, {"r0": "A"})
    keep(keepers, paths, 1)
    nodes.actors["A"].die()
    keepers.settle()
    assert caplog.text.count("the keeper of the states on node host-A died") == 1
    keep(keepers, keepers.reserve_lost(["r0"]), 2)
    assert list_steps(keepers, "A", "r0") == [2]


def test_ranks_whose_keeper_died_take_their_states_from_the_partner(
    nodes: LocalNodes, keepers: StateKeepers
) -> None:
    paths = keepers.reserve({"r0": NUM_BYTES, "r1": NUM_BYTES}, {"r0": "A", "r1": "B"})
    for step in (4, 5):
        keep(keepers, paths, step)
    nodes.actors["A"].die()
    keepers.find({"r0": "A", "r1": "B"})
    assert list_steps(keepers, "A", "r0") == [4, 5]
    assert keepers.reserve_lost(["r0", "r1"]) == {}
    keepers.renew()
    keepers.settle()
    assert list_steps(keepers, "B", "r0") == [4, 5]


def test_a_keeper_that_cannot_start_is_told_with_its_node(
    nodes: LocalNodes, keepers: StateKeepers, monkeypatch: pytest.MonkeyPatch
) -> None:
    keepers.reserve({"r0": NUM_BYTES}, {"r0": "A"})
    nodes.actors["A"].die()
    dead = nodes.actors["A"]
    monkeypatch.setattr(keepers, "_start", lambda node: dead)
    with pytest.raises(RankLostError, match=r"on node host-A gives no memory .*host memory left"):
        keepers.find({"r0": "A"})
