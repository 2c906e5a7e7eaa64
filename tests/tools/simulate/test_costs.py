"""Costs follow sizes: of model, layout, batch and hardware."""

from dataclasses import replace
from typing import Any

import pytest

from mcore_rl.config import Config
from mcore_rl.config.recipe import load_recipe
from mcore_rl.planning.recipe_models import PlannedRun, read_policy
from mcore_rl.tools.simulate.costs import (
    ModelState,
    RecipeCosts,
    TowerCosts,
    TrainCosts,
    engine_speed,
    read_back_s,
    swap_s,
)
from mcore_rl.tools.simulate.kv_cache import EngineSpeed
from mcore_rl.tools.simulate.virtual_time import GPUS, ReachedShares
from mcore_rl.weights.hf.flops import ModelFlops

SHARES = ReachedShares()
BATCH = [[[4000, 4000], [8000]], [[8000], [8000]]]


def recipe(*overrides: str) -> Config:
    return load_recipe("qwen3_30b_a3b_grpo_32", list(overrides))


def speed_of(config: Config) -> EngineSpeed:
    return engine_speed(PlannedRun.make(config), config.simulate, config.data, SHARES)


def train_costs(config: Config, **changes: Any) -> TrainCosts:
    facts = read_policy(config.model.path)
    costs = TrainCosts(
        config.train,
        config.plan,
        config.model.dtype,
        config.drift.routed_experts,
        facts,
        ModelFlops.from_facts(facts),
        config.parallel,
        GPUS["h100"],
        SHARES,
        ModelState(4e9, 8e9, 6e9),
    )
    return replace(costs, **changes)


def test_a_step_takes_its_operations_and_more_where_activations_are_computed_again() -> None:
    config = recipe("parallel.tp=1", "parallel.ep=1", "parallel.dp=2", "train.recompute=none")
    costs = train_costs(config, state=ModelState(0, 0, 0))
    operations = costs.flops.count_training((8000, 8000))
    alone = operations / GPUS["h100"].count_training(has_experts=True)
    fixed = 2 * SHARES.microbatch_s + SHARES.call_s
    assert costs.step_s(BATCH) == pytest.approx(alone + fixed, rel=0.02)
    again = train_costs(recipe(*OVERRIDES, "train.recompute=full"), state=ModelState(0, 0, 0))
    assert again.step_s(BATCH) - fixed == pytest.approx(4 / 3 * (costs.step_s(BATCH) - fixed))
    assert costs.forward_s(BATCH) - fixed == pytest.approx((costs.step_s(BATCH) - fixed) / 3)


OVERRIDES = ("parallel.tp=1", "parallel.ep=1", "parallel.dp=2")


def test_a_pipeline_waits_for_its_longest_micro_batch() -> None:
    flat = train_costs(recipe("parallel.tp=1", "parallel.ep=1", "parallel.dp=4"))
    staged = train_costs(recipe("parallel.tp=1", "parallel.ep=1", "parallel.dp=2", "parallel.pp=2"))
    one = [[[8000]], [[8000]]]
    many = [[[8000]] * 8, [[8000]] * 8]
    assert staged.forward_s(one) / flat.forward_s(one) == pytest.approx(1, rel=0.1)
    assert staged.forward_s(many) / flat.forward_s(many) == pytest.approx(9 / 16, rel=0.1)


def test_experts_on_other_hosts_cost_and_deepep_sends_less_there() -> None:
    wide = ("parallel.ep=16", "parallel.dp=16")
    near = train_costs(recipe("parallel.ep=8", "parallel.dp=16"))
    far = train_costs(recipe(*wide))
    deepep = train_costs(
        recipe(
            *wide,
            "+train.megatron.moe_flex_dispatcher_backend=deepep",
            "+train.megatron.moe_token_dispatcher_type=flex",
        )
    )
    assert near.forward_s(BATCH) < deepep.forward_s(BATCH) < far.forward_s(BATCH)


def test_replicas_reduce_gradients_and_read_only_their_layers_experts() -> None:
    config = recipe()
    costs = train_costs(config)
    empty = replace(costs, state=ModelState(0, 0, 0))
    assert costs.step_s(BATCH) > empty.step_s(BATCH)
    without = train_costs(recipe("drift.routed_experts=false", "train.router_replay=none"))
    assert costs.read_s(1000) > 40 * without.read_s(1000)


def test_decode_is_bound_by_weights_and_its_context() -> None:
    config = recipe()
    speed = speed_of(config)
    assert speed.max_running == config.rollout.max_concurrency
    assert list(speed.fixed_s) == sorted(speed.fixed_s)
    assert speed.fixed_s[256] < 8 * speed.fixed_s[1], "a batch shares the weights"
    faster = speed_of(recipe("simulate.gpu=h200"))
    assert speed.per_context_s / faster.per_context_s == pytest.approx(4.8 / 3.35)
    assert faster.prefill_s(1000) == speed.prefill_s(1000), "the same operations per second"
    assert speed.prefill_s(2000) > 2 * speed.prefill_s(1000)


def test_an_attention_group_reads_and_keeps_its_own_context() -> None:
    whole = speed_of(recipe())
    grouped = speed_of(recipe("rollout.attention_dp=4"))
    assert grouped.kv_capacity == 4 * whole.kv_capacity
    # Four key-value heads: a rank of a group holds them all, a rank of the whole engine one.
    assert grouped.per_context_s == pytest.approx(whole.per_context_s)


def test_a_swap_takes_longer_for_more_weights() -> None:
    gpu = GPUS["h100"]
    assert SHARES.pause_s < swap_s(1e9, gpu, SHARES) < swap_s(2e9, gpu, SHARES)


def test_a_read_back_copies_the_weights_of_a_rank_once() -> None:
    gpu = GPUS["h100"]
    swap = swap_s(2e9, gpu, SHARES)
    assert read_back_s(2e9, gpu, SHARES) == pytest.approx(swap - SHARES.pause_s)
    assert read_back_s(2e9, GPUS["cpu"], SHARES) == pytest.approx(0.13 * 2)


def test_the_weights_that_an_engine_swaps_are_those_of_its_fullest_rank() -> None:
    small, large = (
        RecipeCosts.make(config, SHARES)
        for config in (recipe("rollout.tp=8", "rollout.ep=8"), recipe())
    )
    assert small.swap_s < large.swap_s and small.read_back_s < large.read_back_s


def test_the_tower_takes_its_time_in_the_first_stage_alone() -> None:
    """Its time is hidden behind longer layers of another stage, and not cut by layouts."""
    tower = TowerCosts(forward_s=0.5, step_s=1.5, prefill_s=0.1)
    even = train_costs(recipe(*OVERRIDES, "parallel.pp=2"), tower=tower)
    images = [[1, 2], [2, 2]]
    without = even.forward_s(BATCH)
    whole = even.forward_s(BATCH, images)
    # The fuller coordinate has 4 images, and its longest micro-batch once more for the bubble.
    assert whole - without == pytest.approx(6 * 0.5)
    assert even.step_s(BATCH, images) - even.step_s(BATCH) == pytest.approx(6 * 1.5)
    assert even.forward_s(BATCH, [[0, 0], [0, 0]]) == without
    layers = "parallel.stage_layers=[1,47]"
    uneven = train_costs(recipe(*OVERRIDES, "parallel.pp=2", layers), tower=tower)
    small = replace(uneven, tower=TowerCosts(1e-9, 1e-9, 1e-9))
    assert small.forward_s(BATCH, images) == uneven.forward_s(BATCH)


def test_an_engine_runs_its_tower_with_each_prompt() -> None:
    overrides = ("simulate.prompt_len=1000", "data.max_prompt_len=2048")
    text = load_recipe("qwen2_5_vl_7b_grpo_8", list(overrides))
    images = load_recipe("qwen2_5_vl_7b_grpo_8", [*overrides, "simulate.image_tokens=900"])
    facts = read_policy(text.model.path)
    before, after = speed_of(text), speed_of(images)
    engine = images.train, images.rollout.tp, GPUS["h100"], SHARES
    tower = TowerCosts.make(facts, 900, *engine)
    assert tower is not None and TowerCosts.make(facts, 0, *engine) is None
    assert after.prefill_s(1000) == pytest.approx(before.prefill_s(1000) + tower.prefill_s)
    assert after.prefill_s(100) == before.prefill_s(100)


def test_an_engine_computes_prompts_as_often_as_the_recipe_says() -> None:
    cases = {
        (): False,
        ("simulate.gpu=cpu",): True,
        ("rollout.share_prompts=true",): True,
        ("rollout.share_prompts=false", "simulate.gpu=cpu"): False,
    }
    for overrides, expected in cases.items():
        config = recipe(*overrides)
        speed = speed_of(config)
        assert speed.share_prompts is expected
        assert speed.slow_down(2.0).share_prompts is expected
