"""Copies of states lie on two nodes again after a recovery; a keeper that dies is replaced."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

import pytest

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
