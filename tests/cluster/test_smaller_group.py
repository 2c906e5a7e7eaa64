"""Ranks of lost nodes are left out, come back with a node, and states go to whom they belong."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from mcore_rl.cluster import placement
from mcore_rl.cluster.answers import RankLostError
from mcore_rl.cluster.model_groups import TrainerGroup
from mcore_rl.cluster.nodes import list_alive_nodes
from mcore_rl.cluster.placement import NoRoomError, reserve
from mcore_rl.cluster.session import open_ray_session
from mcore_rl.cluster.state_keepers import StateKeepers
from mcore_rl.config import ClusterConfig
from mcore_rl.planning.bundles import plan_ranks
from mcore_rl.process.kept_copies import Header
from mcore_rl.process.kept_memory import HEADER_BYTES, map_kept
from tests.support.kept_worker import STATE, KeptWorker
from tests.support.trainer_groups import build_trainer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


class Group(TrainerGroup):
    """A trainer of the ranks that keep sixty bytes."""

    worker_cls = KeptWorker  # pyright: ignore[reportAssignmentType]

    def train(self, step: int) -> None:
        self._call("train")
        self.keep_state(step)

    def read(self) -> bytes:
        return b"".join(self._call("tell"))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """The controller's node, and three with room for a rank each."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(3):
        made.add_node(num_cpus=1, object_store_memory=80 << 20)
    with open_ray_session(ClusterConfig(address=made.address, num_nodes=4)):
        yield made
    made.shutdown()


@pytest.fixture
def group(cluster: Cluster, tmp_path: Path) -> Iterator[Group]:
    [slots] = reserve([plan_ranks(3, 1.0, gpus_per_node=0)], timeout_s=60)
    made = build_trainer(Group, slots, tmp_path, timeout_s=120)
    yield made
    made._group.kill()


def lose_node_of(cluster: Cluster, group: Group, rank: int) -> None:
    """Kill the node of a rank, and wait until its process has ended; Ray may not know the loss."""
    node = group._group.find_nodes(60.0)[rank]
    [lost] = (each for each in cluster.list_all_nodes() if each.node_id == node)
    cluster.remove_node(lost, allow_graceful=False)
    until_s = time.monotonic() + 60
    while not isinstance(group.find_loss(60.0), RankLostError):
        assert time.monotonic() < until_s, "the rank lives"
        time.sleep(0.1)


def add_to_state(number: int) -> bytes:
    return bytes(value + number for value in STATE)


def test_ranks_become_fewer_and_more_with_all_states(
    cluster: Cluster, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "ROOM_S", 2.0)
    layouts: list[Any] = []
    group.tell_resized(lambda parallel: layouts.append(parallel.dp_size))
    with closing(StateKeepers(group.list_nodes(), 120.0)) as keepers:
        group.let_shrink(1)
        group.keep_in(keepers)
        for step in (1, 2):
            keepers.settle()
            group.train(step)
        keepers.settle()
        assert group.find_larger() == 3
        lose_node_of(cluster, group, 1)
        group.restart()
        assert (group.dp_size, group.world_size, layouts) == (2, 2, [2])
        assert group.find_kept_steps() == {1, 2}
        group.restore_state(2)
        assert group.read() == add_to_state(2)
        group.train(3)
        keepers.settle()
        assert group.find_larger() == 2
        cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        until_s = time.monotonic() + 120
        while group.find_larger() < 3:
            assert time.monotonic() < until_s, "Ray does not give the new node to the run"
            time.sleep(0.5)
        group.grow()
        assert (group.dp_size, group.world_size, layouts) == (3, 3, [2, 3])
        assert group.find_kept_steps() == {2, 3}
        group.restore_state(3)
        assert group.read() == add_to_state(3)
        group.train(4)
        keepers.settle()
        lose_node_of(cluster, group, 0)
        group.restart()
        assert layouts == [2, 3, 2]
        group.restore_state(4)
        assert group.read() == add_to_state(4)
        group.let_shrink(2)
        lose_node_of(cluster, group, 0)
        with pytest.raises(NoRoomError, match=r"no node has had room .*1 of 3 ranks are left"):
            group.restart()


def test_states_whose_partner_is_lost_are_copied_again(cluster: Cluster) -> None:
    head = ray.get_runtime_context().get_node_id()
    nodes = [each.id for each in list_alive_nodes() if each.id != head]
    where = dict(zip("abc", nodes, strict=True))
    with closing(StateKeepers(nodes, 120.0)) as keepers:
        paths = keepers.reserve(dict.fromkeys(where, 2 * HEADER_BYTES), where)
        for first, _ in paths.values():
            header = Header(5, 0, 2 * HEADER_BYTES, "", 0, 2 * HEADER_BYTES).encode()
            with map_kept(first) as piece:
                piece[: len(header)] = header
        keepers.mirror(dict.fromkeys(where, 0))
        keepers.settle()
        for lost in (keepers._places["a"].partner, where["a"]):
            [node] = (each for each in cluster.list_all_nodes() if each.node_id == lost)
            cluster.remove_node(node, allow_graceful=False)
            keepers.renew()
            keepers.settle()
        keepers.retire("a")
        [copy] = keepers.list_copies("a")["a"].values()
        assert copy.header.step == 5
