"""The nodes of a Ray cluster, and the wait for those that are missing."""

from collections.abc import Iterator

import pytest

from mcore_rl.cluster.nodes import list_alive_nodes, wait_for_nodes
from tests.support.imaginary_gpus import four_imaginary_gpus

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def one_node() -> Iterator[None]:
    with four_imaginary_gpus():
        yield


def test_a_node_that_does_not_come_is_named() -> None:
    [node] = wait_for_nodes(1, timeout_s=5)
    assert [node] == list_alive_nodes() and node.gpus == 4
    with pytest.raises(
        ValueError, match=rf"after 0 s Ray has 1 of 2 nodes: {node.name}; missing: b"
    ):
        wait_for_nodes(2, timeout_s=0, names=[node.name, "b"])
