"""All costs of a recipe."""

import pytest

from mcore_rl.config.recipe import load_recipe
from mcore_rl.planning.deployment import make_deployment
from mcore_rl.planning.recipe_models import PlannedRun
from mcore_rl.planning.sync import predict_sync
from mcore_rl.tools.simulate.costs import RecipeCosts
from mcore_rl.tools.simulate.virtual_time import ReachedShares


def costs_of(recipe: str, *overrides: str) -> RecipeCosts:
    config = load_recipe(recipe, list(overrides))
    return RecipeCosts.make(config, ReachedShares())


def test_a_sync_takes_what_its_plan_says_at_the_share_of_the_link_that_is_reached() -> None:
    config = load_recipe("qwen3_30b_a3b_grpo_32", [])
    run = PlannedRun.make(config)
    plan, _ = predict_sync(run, make_deployment(run))
    costs = RecipeCosts.make(config, ReachedShares(network=0.5))
    assert costs.sync_s == pytest.approx(2 * plan.seconds)
    assert costs.sync_bytes == plan.model_bytes
    slower = costs_of("qwen3_30b_a3b_grpo_32", "plan.link_gbps=200", "plan.memory_gbps=200")
    assert slower.sync_s > 1.3 * costs_of("qwen3_30b_a3b_grpo_32").sync_s


def test_only_recipes_with_a_critic_have_its_costs() -> None:
    assert costs_of("qwen3_30b_a3b_grpo_32").critic is None
    ppo = costs_of("mixtral_8x7b_ppo_16")
    assert ppo.critic is not None
    assert ppo.critic.flops.per_token < ppo.trainer.flops.per_token, "a value instead of logits"


def test_states_are_those_of_the_memory_plan() -> None:
    state = costs_of("qwen3_30b_a3b_grpo_32").trainer.state
    assert state.gradients / 2**30 == pytest.approx(16.4, abs=0.1), "as the recipe's comment says"
    assert state.training == state.gradients + state.optimizer
