"""Trained layers for multi-token prediction take parameters, memory and operations."""

from dataclasses import replace
from math import prod

import pytest

from mcore_rl.config.recipe import load_recipe
from mcore_rl.planning.activations import Activations
from mcore_rl.planning.engine_memory import predict_engine
from mcore_rl.planning.memory import predict_trainer
from mcore_rl.planning.recipe_models import PlannedRun
from mcore_rl.planning.resident_memory import NO_LINKS
from mcore_rl.weights.hf.config import ModelFacts, with_trained_mtp
from mcore_rl.weights.hf.flops import ModelFlops
from mcore_rl.weights.models import hf_tensor_shapes
from tests.planning.test_activations import one_pass

FACTS = ModelFacts.read("recipes/model/deepseek_v3")
HIDDEN, VOCAB = 7168, 129280
OWN = 2 * HIDDEN * HIDDEN
"""Multiplications per token of the projection of hidden states and embeddings."""


def test_a_layer_is_trained_like_one_more_layer_with_another_pass_through_the_head() -> None:
    longer = replace(FACTS, config={**FACTS.config, "num_hidden_layers": 62})
    lens = (100, 300)
    plain, trained, one_more = (
        ModelFlops.from_facts(facts) for facts in (FACTS, FACTS.choose_trained(0.1), longer)
    )
    layer = one_more.count_training(lens) - plain.count_training(lens)
    own = 2.0 * sum(lens) * (3 * OWN + 2 * HIDDEN * VOCAB)
    assert trained.count_training(lens) - plain.count_training(lens) == pytest.approx(layer + own)
    assert trained.count_forward(lens) == plain.count_forward(lens)


def test_the_last_stage_keeps_one_micro_batch_of_it() -> None:
    step = one_pass(1024)
    activations = Activations(with_trained_mtp(FACTS.config), step)
    inputs = 6 * 1024 * HIDDEN * 2
    alone = activations.count_kept(60) + inputs + activations.count_logits(VOCAB)
    assert activations.count_drafts(VOCAB, pp=1) == alone
    assert activations.count_drafts(VOCAB, pp=2) == alone + VOCAB * HIDDEN * 2


def test_states_of_the_layer_lie_on_the_last_stage() -> None:
    recipe = "deepseek_v3_grpo_256"
    plain, trained = (
        predict_trainer(PlannedRun.make(load_recipe(recipe, list(settings))), NO_LINKS)
        for settings in ((), ("train.mtp_loss=0.1",))
    )
    assert plain[:-1] == trained[:-1]
    last, with_layer = plain[-1], trained[-1]
    for what in ("weights", "gradients", "optimizer"):
        assert with_layer[what] > last[what]
    assert "drafts" in with_layer and "drafts" not in last


def test_engines_that_guess_with_the_layer_hold_and_receive_one_layer_more() -> None:
    """The engines compute in one rank each, so that nothing is cut."""
    kept = ("rollout.tp=1", "rollout.ep=1", "train.mtp_loss=0.1")
    runs = [
        PlannedRun.make(load_recipe("glm_4_5_air_dapo_32", [*kept, *settings]))
        for settings in ((), ("rollout.speculate=mtp",))
    ]
    [plain], [guessing] = (predict_engine(run, NO_LINKS) for run in runs)
    policy = runs[0].models.policy
    shapes, of_all = (
        hf_tensor_shapes(facts.config) for facts in (policy, policy.choose_trained(0.1))
    )
    own = sum(prod(of_all[name]) for name in of_all.keys() - shapes.keys())
    assert abs(guessing["weights"] - plain["weights"] - 2 * own) < 1e-3 * own
    layers = policy.sizes["layers"]
    assert guessing["KV cache"] == plain["KV cache"] * (layers + 1) / layers


def test_states_of_linear_attention_are_kept_behind_each_draft() -> None:
    """Ten requests have two drafts each, and one more pads; the layer itself attends."""
    kept = ("rollout.max_concurrency=10", "train.mtp_loss=0.1", "drift.routed_experts=false")
    kept += ("train.router_replay=none",)
    guesses = ("rollout.speculate=mtp", "rollout.speculate_tokens=2")
    [plain], [guessing] = (
        predict_engine(
            PlannedRun.make(load_recipe("qwen3_next_80b_a3b_grpo_64", [*kept, *settings])), NO_LINKS
        )
        for settings in ((), guesses)
    )
    states = (5 * 10 + 1, 5 * 10 + 1 + 11 * 3)
    assert guessing["linear attention"] * states[0] == plain["linear attention"] * states[1]
    assert guessing["KV cache"] * 12 == plain["KV cache"] * 13
