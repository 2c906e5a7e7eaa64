"""A rehearsal changes the sizes of a recipe and keeps the rest."""

from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rl.cli import main
from mcore_rl.config import Config, ParallelConfig
from mcore_rl.config.recipe import leaves, load_recipe
from mcore_rl.config.tree import mappings_under, value_of
from mcore_rl.rewards.scorer import Scorer
from mcore_rl.run.rehearsal import rehearse, tiny_config
from mcore_rl.weights.hf.config import moe_layers, read_hf_config
from mcore_rl.weights.layouts.sglang_models import SGLangSizes, refuse_unserved
from mcore_rl.weights.models import family_of, hf_tensor_shapes, refuse_unsupported
from mcore_rl.weights.models.recipe_checks import check_layout
from tests.support.recipes import LARGE_BY_LANE
from tests.support.samples import make_sample
from tests.support.tiny_models import MODELS, write_model

KINDS = (
    "parallel.tp",
    "parallel.pp",
    "parallel.cp",
    "parallel.ep",
    "rollout.tp",
    "rollout.ep",
    "rollout.attention_dp",
)
CHANGED = {
    "model.path",
    "model.init",
    "model.dtype",
    "run.dir",
    "run.steps",
    "run.resume",
    "data.train",
    "data.max_prompt_len",
    "eval.data",
    "eval.max_prompts",
    "eval.pass_k",
    "reward.workers",
    "reward.overlong_buffer_len",
    "reward.noise",
    "algorithm.filter_overlong",
    "train.optimizer.lr",
    "train.optimizer.warmup_steps",
    "critic.optimizer.lr",
    "critic.optimizer.warmup_steps",
    "train.max_tokens_per_microbatch",
    "train.mini_batches",
    "critic.mini_batches",
    "critic.warmup_steps",
    "rollout.engines",
    "rollout.prompts_per_step",
    "rollout.samples_per_prompt",
    "rollout.max_response_len",
    "rollout.kv_cache_len",
    "rollout.compiled",
    "rollout.quantization",
    "agents.workers",
    "search.index",
    "search.threads",
    "agents.max_turn_len",
    "cluster.cpus_per_rank",
    "cluster.object_store_mib",
    "sync.bucket_mib",
}


OF_PROGRAMS = {"reward.on_error", "reward.error_value", "reward.max_failed_share"}
"""Also changed where rewards run programs, as arithmetic prompts have no tests of programs."""
NEED_GPUS = {
    *("moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_shared_expert_overlap"),
    *("attention_backend", "cuda_graph_max_bs_decode", "moe_a2a_backend"),
    *("moe_runner_backend", "dsa_kernel_backend"),
}


@pytest.mark.parametrize("recipe", LARGE_BY_LANE)
def test_same_family_algorithm_and_kinds_of_parallelism(recipe: str, tmp_path: Path) -> None:
    large = load_recipe(recipe, [f"run.dir={tmp_path / 'run'}"])
    small = rehearse(large)
    for key in KINDS:
        assert value_of(small, key) == min(value_of(large, key), 2), key
    assert small.parallel.world_size <= 8
    runs_programs = recipe == "qwen3_30b_a3b_code_16"
    changed = CHANGED | OF_PROGRAMS if runs_programs else CHANGED
    for key in set(leaves()) - changed - {"rehearse"}:
        if "parallel." in key or key in KINDS:
            continue
        value = value_of(large, key)
        if key in mappings_under(Config):
            value = {k: v for k, v in value.items() if k not in NEED_GPUS}
        assert value_of(small, key) == value, key
    before, after = (read_hf_config(config.model.path) for config in (large, small))
    assert family_of(after) is family_of(before)
    assert {_pattern(name) for name in hf_tensor_shapes(after)} == {
        _pattern(n) for n in hf_tensor_shapes(before)
    }
    assert main(["plan", f"recipe={recipe}", "rehearse=true", f"run.dir={tmp_path / 'again'}"]) == 0


def test_options_beside_it_are_kept_or_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["recipe=qwen3_30b_a3b_grpo_32", "rehearse=true", f"run.dir={tmp_path / 'run'}"]
    assert main(["plan", *settings]) == 0
    assert "rehearsed" not in capsys.readouterr().err
    changed = [
        "run.steps=3",
        "algorithm=grpo",
        "++rollout.engines=2",
        "sync.bucket_mib=64",
        "parallel.tp=4",
    ]
    assert main(["plan", *settings, *changed]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "rehearsed" in line]
    assert told == [
        "rehearsed with parallel.tp=2, not 4",
        "rehearsed with sync.bucket_mib=1.0, not 64.0",
    ]


def test_rewards_that_fail_on_its_prompts_end_no_rehearsal(tmp_path: Path) -> None:
    overrides = [f"run.dir={tmp_path / 'run'}", "reward.parts=[score,judge]"]
    overrides += ["reward.weights=[1.0,0.5]", "judge.path=/judge"]
    reward = rehearse(load_recipe("qwen3_30b_a3b_grpo_8", overrides)).reward
    assert (reward.on_error, reward.error_value, reward.max_failed_share) == ("value", 0.0, 1.0)
    own = rehearse(load_recipe("qwen3_30b_a3b_code_16", overrides[:1])).reward
    assert (own.on_error, own.error_value, own.max_failed_share) == ("value", 0.0, 1.0)
    plain = rehearse(load_recipe("qwen3_30b_a3b_grpo_8", overrides[:1])).reward
    assert (plain.on_error, plain.max_failed_share) == ("leave_out", 0.25)


def test_steps_and_restarts_can_be_asked_for(tmp_path: Path) -> None:
    large = load_recipe("qwen3_30b_a3b_grpo_8", [f"run.dir={tmp_path / 'run'}", "run.steps=3"])
    assert large.run.resume
    small = rehearse(large)
    assert (small.run.steps, small.run.resume) == (1, False)
    asked_for = rehearse(large, ["run.steps", "run.resume"])
    assert (asked_for.run.steps, asked_for.run.resume) == (3, True)


def test_adapters_take_a_turn_each(tmp_path: Path) -> None:
    lora = ["rank=8", "sync=adapter", "targets=[q_proj,o_proj]", "experts=false"]
    lora.append("adapters=[{name:ada,data:[a.parquet]},{name:bob,data:[b.parquet],eval:[c.jsonl]}]")
    options = [f"run.dir={tmp_path / 'run'}", "rollout.mode=sync", "data.train=[]", "eval.data=[]"]
    options += ["train.ddp.overlap_grad_reduce=false", *(f"train.lora.{each}" for each in lora)]
    small = rehearse(load_recipe("qwen3_30b_a3b_grpo_32", options))
    assert small.run.steps == 2 and small.data.train == small.eval.data == []
    for own in small.train.lora.adapters:
        [trained], [held_out] = own.data, own.eval
        assert trained.endswith("inputs/train.parquet") and Path(trained).is_file()
        assert held_out.endswith("inputs/heldout.parquet") and Path(held_out).is_file()


def test_rewards_differ_and_the_learning_rate_moves_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe's own function is called with its parts, and its failures are left out."""
    function = tmp_path / "mine.py"
    function.write_text(
        "def reward(*, data_source, solution_str, ground_truth, extra_info):\n"
        "    if solution_str == 'fail':\n"
        "        raise ValueError('no')\n"
        "    return {'right': 2.0, 'form': 4.0}\n"
    )
    overrides = [f"run.dir={tmp_path / 'run'}", f"reward.path={function}", "reward.workers=0"]
    overrides += ["reward.parts=[right,form]", "reward.weights=[1.0,0.5]"]
    small = rehearse(load_recipe("qwen3_30b_a3b_grpo_8", overrides))
    assert "every reward gets a pseudo-random number below 1" in capsys.readouterr().err
    assert small.train.optimizer.lr == 1e-3 and small.train.optimizer.warmup_steps == 0
    texts = ["a", "b", "c", "fail"]
    samples = [
        replace(make_sample(0, text), response_ids=(token,)) for token, text in enumerate(texts)
    ]
    with Scorer(small.reward, 16) as scorer:
        scores = scorer(samples)
        assert scorer(samples).outcomes() == scores.outcomes()
    parts = zip(scores.parts["right"][:3], scores.parts["form"][:3], strict=True)
    assert scores.outcomes() == pytest.approx([right + 0.5 * form for right, form in parts])
    assert len(set(scores.outcomes())) == 3 and not scores.has_outcome_N[3]
    assert all(4.0 <= reward < 5.5 for reward in scores.outcomes())
    assert scores.errors == ["", "", "", "ValueError: no"]


@pytest.mark.parametrize("kind", MODELS)
def test_every_family_can_be_rehearsed(kind: str, tmp_path: Path) -> None:
    config = read_hf_config(write_model(kind, tmp_path))
    tiny = tiny_config(config, 3)
    refuse_unsupported(tiny)
    check_layout(tiny, ParallelConfig(tp=2, ep=2 if any(moe_layers(config)) else 1))
    refuse_unserved(tiny, SGLangSizes(tp=1 if kind == "olmoe" else 2))
    assert {_pattern(name) for name in hf_tensor_shapes(tiny)} == {
        _pattern(name) for name in hf_tensor_shapes(config)
    }


def _pattern(name: str) -> str:
    return ".".join("#" if part.isdigit() else part for part in name.split("."))


def test_groups_of_experts_are_scored_as_before() -> None:
    """Megatron takes the best top_k // topk_group experts of each group."""
    large = read_hf_config("recipes/model/deepseek_v3")
    tiny = tiny_config(large, 3)
    assert tiny["num_experts_per_tok"] // tiny["topk_group"] == 8 // 4
    assert tiny["n_routed_experts"] % tiny["n_group"] == 0
    assert tiny["first_k_dense_replace"] == 1
