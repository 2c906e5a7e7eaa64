"""Bundles of ranks and engines: how many, and what is refused."""

import pytest

from mcore_rl.config import ServedModelConfig
from mcore_rl.planning.bundles import plan_engine, plan_served


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
    with pytest.raises(
        ValueError, match=r"judge.tp \* judge.pp = 12 fills no whole number of nodes"
    ):
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
