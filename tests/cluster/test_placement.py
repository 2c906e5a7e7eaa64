"""Where engines lie: on nodes of their own, or beside the training ranks whose GPUs they share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from mcore_rl.cluster.group import RankGroup
from mcore_rl.cluster.placement import (
    Slot,
    beside,
    divide,
    engines_beside,
    gpus_per_node,
    plan_engine,
    plan_ranks,
    reserve,
)
from mcore_rl.cluster.served import plan_served
from mcore_rl.cluster.slots import RunSize
from mcore_rl.config import ServedModelConfig
from mcore_rl.config.recipe import load_recipe

NO_GROUP: Any = None


@pytest.mark.parametrize(
    ("num_ranks", "gpus", "num_nodes", "expected"),
    [
        (2, 0, 0, [{"CPU": 1.0}]),
        (2, 0, 2, [{"CPU": 0.5}] * 2),
        (4, 8, 0, [{"CPU": 2.0, "GPU": 4}]),
        (16, 8, 0, [{"CPU": 4.0, "GPU": 8}] * 2),
        (8, 8, 2, [{"CPU": 2.0, "GPU": 4}] * 2),
    ],
)
def test_an_engine_gets_a_bundle_on_each_of_its_nodes(num_ranks, gpus, num_nodes, expected) -> None:
    assert plan_engine(num_ranks, 0.5, gpus, num_nodes) == expected


def test_an_engine_that_fits_no_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match="= 12 fills no whole number of nodes of 8 GPUs"):
        plan_engine(12, 1, 8)
    with pytest.raises(
        ValueError, match=r"rollout.nodes_per_engine=2 puts 16 ranks on a node, which has 8 GPUs"
    ):
        plan_engine(32, 1, 8, num_nodes=2)
    with pytest.raises(ValueError, match=r"judge.tp \* judge.pp = 12 fills no whole number of nodes"):
        plan_served({"judge": ServedModelConfig(path="/a", tp=12)}, 1, 8)


def test_models_that_are_served_get_bundles_of_their_own_and_servers_at_a_url_none() -> None:
    configs = {
        "judge": ServedModelConfig(path="/a", engines=2, tp=2),
        "reward_model": ServedModelConfig(url="http://b"),
        "teacher": ServedModelConfig(path="/c", tp=16),
    }
    assert plan_served(configs, 0.5, 8) == {
        "judge": [[{"CPU": 1.0, "GPU": 2}]] * 2,
        "teacher": [[{"CPU": 4.0, "GPU": 8}] * 2],
    }


def slots_on(nodes: str) -> list[Slot]:
    return [Slot(NO_GROUP, i, {"CPU": 2.0, "GPU": 1}, node) for i, node in enumerate(nodes)]


@pytest.mark.parametrize(
    ("nodes", "num_engines", "ranks_per_engine", "num_nodes", "expected"),
    [
        ("aaaabbbb", 4, 2, 0, [[0], [2], [4], [6]]),
        ("aaaabbbb", 1, 8, 0, [[0, 4]]),
        ("aaaabbbb", 1, 8, 4, [[0, 2, 4, 6]]),
        ("aaaa", 1, 2, 0, [[0]]),
    ],
)
def test_engines_lie_beside_the_ranks_in_order(
    nodes, num_engines, ranks_per_engine, num_nodes, expected
) -> None:
    trainer = divide(slots_on(nodes), 2)
    engines = engines_beside(trainer, num_engines, ranks_per_engine, num_nodes)
    assert [slot.bundle for slot in trainer] == [{"CPU": 1.0, "GPU": 1}] * len(nodes)
    assert [[slot.bundle_index for slot in engine] for engine in engines] == expected
    assert {slot.bundle["CPU"] for engine in engines for slot in engine} == {1.0}
    assert not any("GPU" in slot.bundle for engine in engines for slot in engine)


@pytest.mark.parametrize(("nodes", "ranks_per_engine"), [("aaab", 4), ("aaabbb", 2)])
def test_an_engine_across_a_border_of_nodes_is_refused(nodes: str, ranks_per_engine: int) -> None:
    with pytest.raises(ValueError, match=r"GPUs are shared, but training ranks \d to \d lie on 2 nodes"):
        engines_beside(slots_on(nodes), len(nodes) // ranks_per_engine, ranks_per_engine)


def test_only_a_command_that_trains_the_critic_makes_room_for_it() -> None:
    config = load_recipe("tiny_moe_ppo", ["critic.parallel.tp=2"])
    trained = RunSize.of(config, {}, with_engines=True, with_trainer=True, with_critic=True)
    tuned = RunSize.of(config, {}, with_engines=False, with_trainer=True, with_critic=False)
    assert (trained.critic, tuned.critic) == (2, 0)
    assert trained.num_cpus(config) - tuned.num_cpus(config) == 3 * config.cluster.cpus_per_rank


def test_a_reward_model_on_the_trainers_gpus_takes_none_of_its_own() -> None:
    settings = ["judge.path=/a", "reward_model.path=/b", "reward_model.restarts=0"]
    guest = load_recipe("tiny_moe_grpo", [*settings, "reward_model.colocated=true", "cluster.offload=true"])
    needs = {"with_engines": True, "with_trainer": True, "with_critic": False}
    size = RunSize.of(guest, guest.served_models, **needs)
    assert (list(size.served_guests), size.tenants) == (["reward_model"], 2)
    assert size.num_cpus(guest) == (2 * 2 + 1 + 1) * guest.cluster.cpus_per_rank
    without_trainer = RunSize.of(guest, guest.served_models, **needs | {"with_trainer": False})
    assert not without_trainer.served_guests
    for changed, message in (
        ("reward_model.restarts=1", "reward_model.colocated=true with reward_model.url='' and"),
        ("reward_model.tp=4", r"reward_model.engines \* reward_model.tp \* reward_model.pp = 4: there are"),
        ("rollout.mode=one_step_off", "reward_model.colocated=true with rollout.mode=one_step_off"),
    ):
        with pytest.raises(ValueError, match=message):
            load_recipe("tiny_moe_grpo", [*settings, "reward_model.colocated=true", changed])


@pytest.fixture
def four_gpus() -> Iterator[None]:
    """Of which Ray only believes that they are there; it assigns them all the same."""
    ray.init(address="local", num_cpus=8, num_gpus=4, include_dashboard=False, object_store_memory=80 * 2**20)
    yield
    ray.shutdown()


@pytest.mark.e2e
@pytest.mark.usefixtures("four_gpus")
def test_every_training_rank_has_a_gpu_and_engines_take_none(tmp_path: Path) -> None:
    assert gpus_per_node() == 4
    [slots] = reserve([plan_ranks(4, 1.5, 4)], timeout_s=20)
    trainer_slots = divide(slots, 3)
    critic_slots, engine_slots = beside(trainer_slots, 3), engines_beside(trainer_slots, 2, 2)
    trainer = RankGroup("trainer", trainer_slots, tmp_path)
    engines = RankGroup("engine", [slot for slots in engine_slots for slot in slots], tmp_path)
    assert trainer.gpu_ids(30) == [("0",), ("1",), ("2",), ("3",)]
    assert engines.gpu_ids(30) == [(), ()]
    assert RankGroup("critic", critic_slots, tmp_path).gpu_ids(30) == [(), (), ()]
