"""Both sides of a recipe's weight sync: hosts, relays and links."""

import pytest

from mcore_rl.config import Config
from mcore_rl.config.recipe import load_recipe
from mcore_rl.config.tree import with_settings
from mcore_rl.planning.deployment import (
    Deployment,
    count_engine_links,
    does_relay,
    make_deployment,
)
from mcore_rl.planning.recipe_models import PlannedRun
from mcore_rl.weights.layouts.sglang_models import SGLangSizes

COLOCATED = {
    "rollout.stage_weights": False,
    "rollout.restarts": 0,
    "cluster.colocated": True,
}


@pytest.mark.parametrize(
    ("settings", "expected", "links"),
    [
        ({}, True, 2),
        ({"rollout.engines": 2}, True, 3),
        ({"rollout.engines": 9}, True, 3),
        ({"sync.relay": False, "rollout.engines": 9}, False, 1),
        ({"rollout.stage_weights": False}, False, 1),
        (COLOCATED, False, 1),
    ],
)
def test_engines_of_their_own_with_staged_weights_relay(
    settings: dict[str, object], expected: bool, links: int
) -> None:
    config = with_settings(Config(), settings)
    assert does_relay(config.sync, config.rollout, config.cluster) == expected
    assert count_engine_links(config.rollout.engines, relays=expected) == links


def deployment_of(recipe: str) -> Deployment:
    config = load_recipe(recipe, [])
    return make_deployment(PlannedRun.make(config))


def test_engines_have_hosts_behind_the_trainers_unless_they_share_them() -> None:
    split = deployment_of("qwen3_30b_a3b_grpo_32")
    assert (split.source.num_ranks, split.target.num_ranks) == (16, 16)
    assert (split.stage_ranks, split.engine_ranks) == (16, 4)
    assert [split.hosts.source_host(rank) for rank in (0, 7, 8)] == [0, 0, 1]
    assert [split.hosts.target_host(rank) for rank in (0, 8)] == [2, 3]
    shared = deployment_of("qwen3_30b_a3b_grpo_8")
    assert shared.hosts.target_host(0) == shared.hosts.source_host(0)


def test_sizes_of_engines_are_the_recipes() -> None:
    sizes = SGLangSizes.from_config(load_recipe("deepseek_v3_grpo_128", []).rollout)
    assert (sizes.engines, sizes.tp, sizes.ep, sizes.pp, sizes.dp) == (4, 32, 32, 1, 4)
