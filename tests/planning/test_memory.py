"""Predicted memory: whether it adds up, what it says of moments, layouts and remedies."""

from pathlib import Path

import pytest

from mcore_rl.cli import main
from mcore_rl.config.recipe import load_recipe
from mcore_rl.planning.engine_memory import predict_engine
from mcore_rl.planning.memory import _count_stages, predict_memory, predict_trainer
from mcore_rl.planning.peak_memory import RankMemory, find_peaks
from mcore_rl.planning.recipe_models import PlannedRun
from mcore_rl.planning.resident_memory import NO_LINKS
from tests.support.policy import read
from tests.support.recipes import LARGE_BY_LANE, plan_of

QWEN = "qwen3_30b_a3b_grpo_32"
PRECISION_AWARE = ("use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype")


@pytest.mark.parametrize("recipe", LARGE_BY_LANE)
def test_every_recipe_fits_and_its_header_says_what_the_plan_says(recipe: str) -> None:
    plan = plan_of(recipe)
    assert plan["fits"]
    comments = [
        line for line in read(Path(f"recipes/{recipe}.yaml")).splitlines() if line.startswith("#")
    ]
    header = " ".join(" ".join(line.strip("# ") for line in comments).split())
    for sentence in plan["explained"]:
        assert sentence in header


def predict(recipe: str, *settings: str) -> list[RankMemory]:
    config = load_recipe(recipe, list(settings))
    return predict_memory(PlannedRun.make(config))


def total(ranks: list[RankMemory], what: str, side: str = "trainer") -> float:
    return max(rank.uses.get(what, 0) for rank in ranks if rank.side == side)


def test_states_of_a_model_are_divided_as_megatron_divides_them() -> None:
    """All of 30.5e9 parameters: 14 bytes of each lie on one rank or another."""
    ranks = predict(QWEN, "rollout.mode=sync", "parallel.dp=8", "parallel.tp=1", "parallel.ep=8")
    assert total(ranks, "optimizer") * 8 == pytest.approx(8 * 30.53e9, rel=1e-3)
    experts = 48 * 128 * 3 * 2048 * 768
    assert total(ranks, "weights") == pytest.approx(2 * (30.53e9 - experts * 7 / 8), rel=1e-3)
    assert total(ranks, "gradients") == 2 * total(ranks, "weights")


def test_rounded_matrices_are_kept_while_a_pass_runs() -> None:
    layout = ["rollout.mode=sync", "parallel.dp=8", "parallel.tp=1", "parallel.ep=8"]
    experts = 48 * 128 * 3 * 2048 * 768 / 8
    attention = 48 * 2048 * 128 * (2 * 32 + 2 * 4)
    for precision, numbers in (("none", 0), ("int4", experts), ("fp8", experts + attention)):
        ranks = predict(QWEN, *layout, f"train.fake_quantization={precision}")
        assert total(ranks, "weights before rounding") == 2 * numbers


def test_lion_keeps_one_moment_of_all_parameters_and_muon_of_its_matrices() -> None:
    """Float32 main weights and moments: 12, 8 and nearly 8 bytes of 30.53e9 parameters."""
    layout = ["rollout.mode=sync", "parallel.dp=8", "parallel.tp=1", "parallel.ep=8"]
    plain = [f"train.optimizer.megatron.{name}=null" for name in PRECISION_AWARE]
    bytes_of = {
        name: total(predict(QWEN, *layout, *plain, f"train.optimizer.name={name}"), "optimizer") * 8
        for name in ("adam", "lion", "muon")
    }
    assert bytes_of["adam"] == pytest.approx(12 * 30.53e9, rel=1e-3)
    assert bytes_of["lion"] == pytest.approx(8 * 30.53e9, rel=1e-3)
    embeddings = 2 * 151_936 * 2048
    assert bytes_of["muon"] == pytest.approx(8 * 30.53e9 + 4 * embeddings, rel=1e-3)


def test_pipeline_stages_keep_the_micro_batches_in_flight() -> None:
    settings = ["parallel.pp=4", "parallel.dp=2", "parallel.ep=4", "train.recompute=none"]
    ranks = [rank for rank in predict(QWEN, *settings) if rank.side == "trainer"]
    kept = [rank.uses["activations"] for rank in ranks]
    working = 2 * kept[3] - kept[2]
    assert [round((size - working) / (kept[3] - working)) for size in kept] == [4, 3, 2, 1]
    assert [rank for rank in ranks if "logits and log-probs" in rank.uses] == ranks[-1:]


def test_recompute_keeps_less() -> None:
    sizes = [
        total(predict(QWEN, f"train.recompute={kind}"), "activations")
        for kind in ("none", "selective", "full")
    ]
    assert sizes[0] > 1.1 * sizes[1] > 3 * sizes[2]


def test_shared_gpus_hold_what_nobody_has_given_up() -> None:
    colocated = ["cluster=h100_colocated", "rollout.mode=sync"]
    colocated += ["train.max_tokens_per_microbatch=10240"]  # train steps are not the fullest
    away = predict(QWEN, *colocated)
    at_hand = predict(QWEN, *colocated, "cluster.offload=false", "parity_check.sequences=0")
    assert {rank.moment for rank in at_hand} == {"generation"}
    assert any("engine's KV cache" in rank.uses for rank in at_hand)
    assert {rank.moment for rank in away} == {"train step"}
    given_up = {"engine's weights", "engine's KV cache"}
    assert not any(given_up & rank.uses.keys() for rank in away)
    assert all("engine's CUDA graphs" in rank.uses for rank in away), "these stay"
    assert all(rank.num_processes == 2 for rank in away + at_hand)


def test_a_reward_model_on_shared_gpus_counts_while_it_scores(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(120 * 2**30)  # takes no room on the disk
    settings = ["cluster=h100_colocated", "rollout.mode=sync", f"reward_model.path={tmp_path}"]
    settings += ["reward_model.restarts=0", "reward_model.colocated=true", "reward_model.tp=2"]
    ranks = predict(QWEN, *settings)
    assert {(rank.moment, rank.num_processes) for rank in ranks} == {("scoring", 3)}
    assert ranks[0].uses["reward_model's weights"] == 60 * 2**30
    assert "engine's weights" in ranks[0].uses


def test_a_critic_that_sees_images_counts_its_tower() -> None:
    ppo = ["algorithm.advantage=gae", "critic.parallel.pp=2"]
    config = load_recipe("qwen2_5_vl_7b_grpo_8", ppo)
    ranks = [rank for rank in predict_memory(PlannedRun.make(config)) if rank.side == "critic"]
    first, last = ranks
    for what in ("tower's activations", "pixels"):
        assert first.uses[what] > 0 and what not in last.uses
    assert "logits and log-probs" not in last.uses
    frozen = load_recipe("qwen2_5_vl_7b_grpo_8", [*ppo, "train.vision=none"])
    less, *_ = (r for r in predict_memory(PlannedRun.make(frozen)) if r.side == "critic")
    for what in ("gradients", "optimizer", "tower's activations"):
        assert less.uses[what] < first.uses[what], what
    assert less.uses["weights"] == first.uses["weights"]


def test_engines_hold_a_half_of_the_weights_in_fp8_and_a_third_in_int4() -> None:
    """All but experts are bfloat16 in INT4, whose words and scales take 9/16 of a byte."""
    bf16, fp8, int4 = (
        total(
            predict(
                "kimi_k2_grpo_256_128",
                "rollout.tp=16",
                "rollout.ep=16",
                "rollout.sglang.moe_a2a_backend=none",
                f"rollout.quantization={kind}",
            ),
            "weights",
            "engine",
        )
        for kind in ("none", "fp8", "int4")
    )
    assert 0.5 < fp8 / bf16 < 0.56
    assert 0.28 < int4 / bf16 < 0.33


def test_a_rank_beside_an_engine_has_words_and_scales_of_its_experts_while_it_sends() -> None:
    run = PlannedRun.make(load_recipe("qwen3_30b_a3b_grpo_8", ["rollout.quantization=int4"]))
    [trainer], [engine] = predict_trainer(run), predict_engine(run)
    sent = 128 * 48 * 3 * 2048 * 768 / run.parallel.ep * 9 / 16
    assert trainer["experts in INT4"] == sent
    [peak] = find_peaks(run.parallel, True, [trainer], [], [engine], {})
    assert peak.moment == "train step"
    assert "trainer's experts in INT4" not in peak.uses
    sending = {what: trainer[what] for what in ("weights", "experts in INT4")}
    [peak] = find_peaks(run.parallel, True, [sending], [], [{"weights": 1.0}], {})
    assert peak.moment == "weight sync"
    assert peak.uses["trainer's experts in INT4"] == sent


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            "parallel.tp=3 parallel.dp=16 parallel.ep=1",
            "parallel.tp=3 does not divide num_attention_heads=32",
        ),
        (
            "parallel.etp=5 parallel.dp=20",
            "parallel.etp=5 does not divide an expert's intermediate size=768",
        ),
        ("train.mini_batches=3", "= 2048 is not divisible by train.mini_batches=3"),
        ("rollout.max_response_len=15000", "= 17048 exceeds train.max_tokens_per_microbatch=16384"),
        ("rollout.kv_cache_len=9000", "= 10240 exceeds rollout.kv_cache_len=9000"),
        (
            "rollout.max_response_len=50000 train.max_tokens_per_microbatch=60000",
            "= 52048 exceeds max_position_embeddings=40960 of config.json",
        ),
        (
            "rollout.pp=2",
            "rollout.pp=2 with drift.routed_experts=true: an engine of several pipeline stages"
            " reports",
        ),
        ("plan.expert_load=0.5", "plan.expert_load=0.5: must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_one_another(
    settings: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"recipe={QWEN}", *settings.split()]) == 2
    assert message in capsys.readouterr().err


def test_the_parameters_of_a_layout_are_counted_once() -> None:
    """A search for a plan that fits asks for each layout with less and less recomputed."""
    _count_stages.cache_clear()
    for settings in ([], ["train.recompute=full"], ["train.max_tokens_per_microbatch=16384"]):
        predict_trainer(PlannedRun.make(load_recipe("qwen3_30b_a3b_grpo_8", settings)), NO_LINKS)
    assert _count_stages.cache_info().misses == 1
