"""Sizes of engines and lengths of sequences that the model does not allow are refused before a
start.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from mcore_rl.checks.engines import (
    check_drafts,
    check_engine_sizes,
    check_eval_lens,
    check_indexer_reports,
    check_lens,
)
from mcore_rl.checks.sizes import check_engines, check_rounding, check_sizes
from mcore_rl.cli import main
from mcore_rl.config import Config, DriftConfig, RolloutConfig
from mcore_rl.config.recipe import load_recipe
from mcore_rl.planning.recipe_models import PlannedRun
from mcore_rl.planning.verdict import check_planned_sizes
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.low_precision import Precision
from mcore_rl.weights.models.recipe_checks import check_sharing
from tests.support.recipes import LARGE_BY_LANE

QWEN = ModelFacts.read("recipes/model/qwen3_30b_a3b")
DEEPSEEK = ModelFacts.read("recipes/model/deepseek_v3")
SPARSE = ModelFacts.read("recipes/model/deepseek_v32")
GPT_OSS = ModelFacts.read("recipes/model/gpt_oss_20b")
QWEN_VL = ModelFacts.read("recipes/model/qwen2_5_vl_7b")


def altered(model: ModelFacts, settings: dict[str, int]) -> ModelFacts:
    return replace(model, config={**model.config, **settings})


def check(config: Config, policy: ModelFacts) -> None:
    layout = config.parallel, None, config.train
    check_sizes(policy, *layout, config.rollout, config.data, config.plan.ranks_per_host)


def check_served(config: Config, policy: ModelFacts) -> None:
    rollout, data = config.rollout, config.data
    check_engines(policy, config.model.dtype, rollout, config.drift, data, config.eval)


@pytest.mark.parametrize("recipe", LARGE_BY_LANE)
def test_shipped_recipes_pass(recipe: str) -> None:
    config = load_recipe(recipe, [])
    run = PlannedRun.make(config)
    check_planned_sizes(run, config.data, config.drift, config.eval)


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        (QWEN, {"tp": 3}, "rollout.tp=3 does not divide num_attention_heads=32 of config.json"),
        (
            DEEPSEEK,
            {"tp": 24, "attention_dp": 8, "ep": 8},
            "rollout.tp / rollout.attention_dp=3 does not divide num_attention_heads=128",
        ),
        (
            altered(QWEN, {"num_key_value_heads": 6, "num_attention_heads": 24}),
            {"tp": 4},
            "rollout.tp=4 neither divides num_key_value_heads=6 of config.json nor is a multiple",
        ),
        (
            altered(QWEN, {"num_experts": 60}),
            {"tp": 8, "ep": 8},
            "rollout.ep=8 does not divide the number of experts=60",
        ),
        (
            altered(QWEN, {"moe_intermediate_size": 36}),
            {"tp": 16, "ep": 2},
            "rollout.tp / rollout.ep=8 does not divide an expert's intermediate size=36",
        ),
        (
            altered(DEEPSEEK, {"intermediate_size": 18433}),
            {"tp": 8, "ep": 8},
            "rollout.tp=8 does not divide intermediate_size=18433",
        ),
        (
            altered(QWEN_VL, {"num_key_value_heads": 28, "intermediate_size": 7 * 2706}),
            {"tp": 7},
            "rollout.tp=7 does not divide vision_config's number of heads=16 of config.json",
        ),
        (GPT_OSS, {"pp": 25}, "rollout.pp=25 exceeds num_hidden_layers=24 of config.json"),
    ],
)
def test_engines_that_do_not_divide_the_model(
    model: dict[str, Any], sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_engine_sizes(RolloutConfig(**sizes), model)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        (QWEN, {}, "model.path=.*: the model has no indexers; set drift.indexer_topk=false"),
        (SPARSE, {"pp": 2}, "rollout.pp=2 with drift.indexer_topk=true"),
        (SPARSE, {"tp": 8, "attention_dp": 4}, "each rank has all heads; set .*attention_dp=8"),
    ],
)
def test_engines_that_cannot_report_chosen_keys(
    model: ModelFacts, sizes: dict[str, int], message: str
) -> None:
    asked = DriftConfig(indexer_topk=True)
    check_indexer_reports(DriftConfig(), RolloutConfig(**sizes), model)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        check_indexer_reports(asked, RolloutConfig(**sizes), model)  # type: ignore[arg-type]
    whole = {"tp": 8, "attention_dp": 8}
    check_indexer_reports(asked, RolloutConfig(**whole), SPARSE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "experts", "message"),
    [
        (SPARSE, False, "the model has sparse attention, .*; set rollout.speculate=none"),
        (QWEN_VL, False, "the model sees images"),
        (QWEN, True, "with drift.routed_experts=true: .*set drift.routed_experts=false"),
    ],
)
def test_engines_that_cannot_speculate(model: ModelFacts, experts: bool, message: str) -> None:
    drift = DriftConfig(routed_experts=experts)
    check_drafts(drift, RolloutConfig(), model)
    with pytest.raises(ValueError, match=message):
        check_drafts(drift, RolloutConfig(speculate="ngram"), model)
    check_drafts(DriftConfig(routed_experts=False), RolloutConfig(speculate="ngram"), QWEN)


def test_engines_that_guess_with_one_layer_report_experts() -> None:
    guessing, asked = RolloutConfig(speculate="mtp"), DriftConfig(routed_experts=True)
    deepseek = ModelFacts.read("recipes/model/deepseek_v3")
    check_drafts(asked, guessing, deepseek)
    several = altered(deepseek, {"num_nextn_predict_layers": 2})
    with pytest.raises(ValueError, match=r"config.json has 2 layers for multi-token prediction"):
        check_drafts(asked, guessing, several)


def test_engines_guess_with_the_layer_of_gated_delta_nets_alone() -> None:
    model, drift = ModelFacts.read("recipes/model/qwen3_next_80b_a3b"), DriftConfig()
    check_drafts(drift, RolloutConfig(speculate="mtp"), model)
    with pytest.raises(ValueError, match="the model has linear attention"):
        check_drafts(drift, RolloutConfig(speculate="ngram"), model)


def test_a_tower_that_engines_do_not_cut_need_not_be_divided() -> None:
    config = altered(QWEN_VL, {"num_key_value_heads": 28, "intermediate_size": 7 * 2706})
    whole = {"mm_enable_dp_encoder": True}
    check_engine_sizes(RolloutConfig(tp=7, sglang=whole), config)


def test_engines_of_a_vision_model_are_not_quantized() -> None:
    config = load_recipe("qwen3_30b_a3b_grpo_8", ["rollout.quantization=fp8"])
    with pytest.raises(ValueError, match=r"quantization=fp8 .* would quantize its vision tower"):
        check_served(config, QWEN_VL)


@pytest.mark.parametrize(
    ("recipe", "sizes", "reason"),
    [
        (
            "qwen3_30b_a3b_grpo_8",
            {"tp": 16, "ep": 1},
            "engine rank 0 holds .*down_proj.* groups",
        ),
        ("qwen3_30b_a3b_grpo_8", {"tp": 16, "ep": 4}, ""),
        ("nemotron3_nano_30b_a3b_grpo_8", {}, "in routed experts with a gate, which the model"),
        ("qwen2_5_vl_7b_grpo_8", {}, "in routed experts with a gate, which the model"),
    ],
)
def test_int4_engines_have_whole_groups_of_gated_experts(
    recipe: str, sizes: dict[str, int], reason: str
) -> None:
    config = load_recipe(recipe, [])
    policy = PlannedRun.make(config).models.policy
    config.rollout = replace(config.rollout, quantization="int4", **sizes)
    refusal = pytest.raises(ValueError, match=f"rollout.quantization=int4 with .*{reason}")
    with refusal if reason else nullcontext():
        check_served(config, policy)


def test_trainer_ranks_have_whole_groups_of_what_int4_engines_get() -> None:
    config = load_recipe("qwen3_30b_a3b_grpo_8", ["rollout.quantization=int4"])
    check(config, QWEN)
    config.parallel = replace(config.parallel, ep=1, etp=16, dp=4)
    with pytest.raises(ValueError, match=r"rollout.quantization=int4 .* trainer rank 0 holds"):
        check(config, QWEN)


def test_more_ranks_than_key_value_heads_hold_copies() -> None:
    check_engine_sizes(RolloutConfig(tp=8, ep=8), QWEN)


def test_a_plan_of_such_engines_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "plan",
                "recipe=qwen3_30b_a3b_grpo_8",
                "rollout.engines=2",
                "rollout.tp=3",
                "rollout.ep=1",
            ]
        )
        == 2
    )
    assert "rollout.tp=3 does not divide num_attention_heads=" in capsys.readouterr().err


def test_tensor_parallel_ranks_share_a_host() -> None:
    config = load_recipe("qwen3_30b_a3b_grpo_8", [])
    check(config, QWEN)
    with pytest.raises(
        ValueError,
        match=r"parallel.tp=4 puts ranks 4 to 7, .* on two hosts of plan.ranks_per_host=6 GPUs",
    ):
        check(replace(config, plan=replace(config.plan, ranks_per_host=6)), QWEN)


def test_a_sequence_of_the_full_length_must_fit() -> None:
    config = load_recipe("tiny_moe_grpo", ["rollout.max_response_len=448"])
    groups = config.data, config.rollout, config.train
    check_lens(*groups, replace(QWEN, config={"max_position_embeddings": 512}))
    with pytest.raises(ValueError, match=r"= 512 exceeds max_position_embeddings=511"):
        check_lens(*groups, replace(QWEN, config={"max_position_embeddings": 511}))


def test_a_response_of_an_evaluation_must_fit_engines_but_no_micro_batch() -> None:
    options = ["rollout.max_response_len=64", "eval.data=[x]", "eval.max_response_len=4000"]
    sizes = ["train.max_tokens_per_microbatch=1024", "rollout.kv_cache_len=4096"]
    config = load_recipe("tiny_moe_grpo", ["data.max_prompt_len=96", *options, *sizes])
    groups = config.data, config.rollout
    long = replace(QWEN, config={"max_position_embeddings": 4096})
    check_eval_lens(*groups, config.eval, long)
    with pytest.raises(ValueError, match=r"eval.max_response_len = 4096 exceeds max_position_emb"):
        check_eval_lens(
            *groups, config.eval, replace(QWEN, config={"max_position_embeddings": 4095})
        )
    longer = replace(config, eval=replace(config.eval, max_response_len=4001))
    with pytest.raises(ValueError, match=r"eval.max_response_len = 4097 exceeds rollout.kv_cache"):
        check_served(longer, replace(long, config={**QWEN.config, **long.config}))


def test_a_run_that_cannot_share_beginnings_is_refused_before_it_starts() -> None:
    config = load_recipe("qwen3_30b_a3b_grpo_8", ["train.share_prefixes=true", "parallel.cp=1"])
    check(config, QWEN)
    cut = replace(config, parallel=replace(config.parallel, cp=2))
    with pytest.raises(ValueError, match=r"share_prefixes=true with parallel\.cp=2"):
        check(cut, QWEN)
    with pytest.raises(ValueError, match="deepseek_v3: a model with latent attention"):
        check_sharing(DEEPSEEK.config, config.parallel)


@pytest.mark.parametrize(
    ("recipe", "precision", "reason"),
    [
        ("gpt_oss_20b_grpo_8", "int4", "whose experts are stacked in one tensor"),
        ("qwen2_5_vl_7b_grpo_8", "fp8", "engines in fp8 serve no vision tower"),
        ("qwen2_5_vl_7b_grpo_8", "int4", "the model has no routed experts"),
        ("kimi_k2_grpo_256_128", "int4", ""),
        ("kimi_k2_grpo_256_128", "fp8", ""),
    ],
)
def test_weights_are_rounded_where_engines_of_the_precision_would_compute_alike(
    recipe: str, precision: Precision, reason: str
) -> None:
    config = load_recipe(recipe, [])
    policy = PlannedRun.make(config).models.policy
    refusal = pytest.raises(ValueError, match=f"train.fake_quantization={precision} .*{reason}")
    with refusal if reason else nullcontext():
        check_rounding(policy, config.parallel, precision)
