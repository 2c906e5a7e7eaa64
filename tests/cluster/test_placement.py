"""Where engines run: on nodes of their own, or beside the training ranks whose GPUs they share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import remove_placement_group

from mcore_rl.cluster.group import RankGroup
from mcore_rl.cluster.placement import find_gpus_per_node, reserve
from mcore_rl.planning.bundles import plan_engine, plan_ranks
from mcore_rl.planning.slots import (
    colocate_engines,
    colocate_ranks,
    divide,
)
from tests.support.imaginary_gpus import four_imaginary_gpus


@pytest.fixture
def four_gpus() -> Iterator[None]:
    """Ray is told of four GPUs that do not exist; it assigns them all the same."""
    with four_imaginary_gpus():
        yield


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.usefixtures("four_gpus")
def test_every_training_rank_has_a_gpu_and_engines_take_none(tmp_path: Path) -> None:
    assert find_gpus_per_node() == 4
    [slots] = reserve([plan_ranks(4, 1.5, 4)], timeout_s=20)
    trainer_slots = divide(slots, 3)
    critic_slots, engine_slots = (
        colocate_ranks(trainer_slots, 3),
        colocate_engines(trainer_slots, 2, 2),
    )
    trainer = RankGroup("trainer", trainer_slots, tmp_path)
    engines = RankGroup("engine", [slot for slots in engine_slots for slot in slots], tmp_path)
    assert trainer.gpu_ids(30) == [("0",), ("1",), ("2",), ("3",)]
    assert engines.gpu_ids(30) == [(), ()]
    assert RankGroup("critic", critic_slots, tmp_path).gpu_ids(30) == [(), (), ()]


@pytest.fixture
def two_rays() -> Iterator[None]:
    """Two raylets of four CPUs each, which Ray takes for two nodes."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    cluster.add_node(num_cpus=4)
    ray.init(address=cluster.address)
    try:
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.usefixtures("two_rays")
def test_parts_of_an_engine_lie_on_nodes_of_their_own_and_ranks_beside_them() -> None:
    engine = plan_engine(2, 1.0, 0, num_nodes=2)
    trainer = plan_ranks(2, 2.0, 0)
    ranks, parts, one = reserve([trainer, engine, engine[:1]], timeout_s=20, spread=(1, 2))
    assert len({slot.node for slot in parts}) == len({slot.node for slot in ranks}) == 2
    assert [slot.bundle for slot in ranks] == trainer and len(one) == 1
    for group in {slot.group.id: slot.group for slot in (*ranks, *parts, *one)}.values():
        remove_placement_group(group)
    # Four parts have no four nodes: they share one, as on a single machine.
    [four] = reserve([plan_engine(4, 1.0, 0, num_nodes=4)], timeout_s=20, spread=(0,))
    assert len({slot.node for slot in four}) == 1
    remove_placement_group(four[0].group)
    with pytest.raises(ValueError, match="each part of an engine needs a node of its own"):
        reserve([plan_engine(2, 5.0, 0, num_nodes=2)], timeout_s=3, spread=(0,))
    with pytest.raises(ValueError, match=r"needs 10 CPU .* has free: \d of 8 CPU, 0 of 0 GPU\."):
        reserve([plan_ranks(2, 1.0, 0), plan_engine(2, 4.0, 0, num_nodes=2)], 3, spread=(1,))
    [whole] = reserve([plan_ranks(2, 4.0, 0)], timeout_s=20)
    assert len(whole) == 2, "nothing of what failed stays reserved"
