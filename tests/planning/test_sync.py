"""Predictions of `mcore-rl plan` for weight syncs: numbers that add up, from config.json alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.cli import main
from mcore_rl.config.recipe import load_recipe
from mcore_rl.planning.deployment import make_deployment
from mcore_rl.planning.recipe_models import PlannedRun
from mcore_rl.planning.sync import (
    find_busiest_copy,
    make_comparison_table,
    make_flows_table,
    predict_seconds,
    predict_sync,
)
from mcore_rl.weights.plan.cost import Load, Traffic
from tests.support.policy import read
from tests.support.recipes import LARGE, LARGE_BY_LANE, plan_of

SPLIT = [
    "cluster=h200",
    "plan.gpu_memory_gib=300",
    "rollout.stage_weights=true",
    "rollout.restarts=1",
]
"""Engines on GPUs of their own, with room for the weights twice, whatever GPU that takes."""
CUT = ["rollout.sglang.moe_a2a_backend=null", "rollout.sglang.moe_dense_tp_size=null"]
"""Cuts dense layers and shared experts over the ranks of an engine."""
EXAMPLES = {
    "qwen3_30b_a3b_grpo_32": (16, 16, 30.5e9),
    "qwen3_235b_a22b_grpo_64_64": (64, 64, 235.1e9),
    "deepseek_v3_grpo_256": (256, 256, 671.0e9),
    "kimi_k2_grpo_256_128": (256, 128, 1026.4e9),
}


@pytest.mark.parametrize(
    "recipe",
    [
        "qwen3_30b_a3b_grpo_32",
        pytest.param("qwen3_235b_a22b_grpo_64_64", marks=pytest.mark.slow),
        "deepseek_v3_grpo_256",
        pytest.param("kimi_k2_grpo_256_128", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("whole", "times_bound"), [(False, 1.07), (True, 1.2)])
def test_engines_of_their_own(
    recipe: str, whole: bool, times_bound: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights that every rank of an engine has whole are sent to each of them."""
    hosts_of_one_engine = (
        ["rollout.engines=2", "rollout.tp=8", "rollout.ep=8"] if "30b" in recipe else []
    )
    settings = [*SPLIT, *hosts_of_one_engine, *([] if whole else CUT)]
    assert main(["plan", f"recipe={recipe}", *settings, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    trainer_ranks, engine_ranks, parameters = EXAMPLES[recipe]
    assert (plan["trainer_ranks"], plan["engine_ranks"]) == (trainer_ranks, engine_ranks)
    assert plan["model_bytes"] == pytest.approx(2 * parameters, rel=2e-3)
    bound = plan["lower_bound_bytes"]
    assert bound <= plan["busiest_link_bytes"] <= times_bound * bound
    engines = plan["direct_trainer_out_per_rank"][1] / plan["trainer_out_per_rank"][1]
    assert plan["relay_out_per_rank"][1] <= plan["engine_in_per_rank"][1]
    assert engines > 1.9
    assert plan["seconds"] == pytest.approx(plan["busiest_link_bytes"] * 8 / 400e9)
    assert plan["gather_broadcast_seconds"] > 5 * plan["seconds"]
    assert plan["gather_broadcast_in_per_rank"] == plan["model_bytes"]


def test_fp8_engines_are_sent_half_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSeek-V3 on engines of 16 ranks: all but embeddings, output layer, router and norms in
    FP8.
    """
    plans = []
    for quantization in ("none", "fp8"):
        settings = ["rollout.engines=16", "rollout.tp=16", "rollout.ep=16"]
        settings += [f"rollout.quantization={quantization}", *CUT]
        assert main(["plan", "recipe=deepseek_v3_grpo_256", *SPLIT, *settings, "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    plain, fp8 = plans
    kept = 2 * 129280 * 7168 + 58 * 256 * 7168
    projections = 671.0e9 - kept
    assert fp8["model_bytes"] == pytest.approx(2 * kept + projections * (1 + 4 / 128**2), rel=1e-3)
    assert fp8["seconds"] == pytest.approx(plain["seconds"] / 2, rel=0.06)
    assert fp8["lower_bound_bytes"] <= fp8["busiest_link_bytes"] <= 1.08 * fp8["lower_bound_bytes"]


def test_int4_engines_are_sent_words_and_scales_of_experts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = ["recipe=qwen3_30b_a3b_grpo_32", "rollout.quantization=int4"]
    assert main(["plan", *settings, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["model_bytes"]
    experts = 128 * 48 * 3 * 2048 * 768
    others = 30.532e9 - experts
    assert found == pytest.approx(2 * others + experts * 9 / 16, rel=1e-3)
    assert main(["plan", *settings, "--detail"]) == 0
    assert f"{found / 2**30:.1f} GiB" in capsys.readouterr().out


def test_the_tables_name_who_sends_what(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["recipe=qwen3_30b_a3b_grpo_32", "parallel.pp=2", "parallel.dp=4"]
    assert main(["plan", "--detail", *settings]) == 0
    out = capsys.readouterr().out
    for text in (
        "trainer ranks 8-15",
        "layers 24-47",
        "4 engines",
        "lower bound",
        "gather and broadcast",
    ):
        assert text in out


def test_a_shared_host_needs_no_network(capsys: pytest.CaptureFixture[str]) -> None:
    settings = [
        "rollout.engines=1",
        "rollout.tp=16",
        "rollout.ep=16",
        "plan.ranks_per_host=16",
        "cluster.colocated=true",
        "rollout.mode=sync",
        "rollout.stage_weights=false",
        "rollout.restarts=0",
    ]
    command = ["plan", "--json", "recipe=qwen3_30b_a3b_grpo_32", *settings]
    assert main(command) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["network_bytes"] == 0
    assert 0 < plan["engine_local_in_per_rank"][0] <= plan["busiest_copy_bytes"]
    assert plan["seconds"] == pytest.approx(plan["busiest_copy_bytes"] * 8 / 400e9)
    assert main([*command, "plan.memory_gbps=3200"]) == 0
    faster = json.loads(capsys.readouterr().out)
    assert faster["seconds"] == pytest.approx(plan["seconds"] / 8)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "parallel.stage_layers=[22,24,24,23]",
            "are 93 layers together, but num_hidden_layers=94",
        ),
        (
            "rollout.tp=128 rollout.ep=128 rollout.attention_dp=1"
            " rollout.sglang.enable_dp_lm_head=null",
            "rollout.tp=128 does not divide num_attention_heads=64 of config.json",
        ),
        ("parallel.tp=3 parallel.dp=16", "parallel.tp=3 does not divide num_attention_heads=64"),
        ("model.path=/nowhere", "/nowhere/config.json does not exist"),
        ("plan.link_gbps=0", "plan.link_gbps=0.0: must be greater than 0"),
        ("rollout.quantization=fp8 model.dtype=float32", "needs model.dtype=bfloat16"),
        (
            "rollout.quantization=fp8 rollout.ep=1 rollout.sglang.moe_a2a_backend=null",
            "target rank 0 holds 'model.layers.0.mlp.experts.0.gate_proj.weight' (0, 0) to (96,"
            " 4096)",
        ),
        (
            "model.path=recipes/model/gpt_oss_20b rollout.quantization=fp8 parallel.stage_layers=[]"
            " rollout.attention_dp=1 rollout.ep=1 rollout.tp=8"
            " rollout.sglang.enable_dp_lm_head=null rollout.sglang.moe_a2a_backend=null",
            "whose experts are stacked in one tensor: only none is supported",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(
    setting: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "recipe=qwen3_235b_a22b_grpo_64_64", *setting.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_nothing_is_started_and_no_engine_is_imported() -> None:
    code = (
        "import sys; from mcore_rl.cli import main; main(['plan', 'recipe=qwen3_30b_a3b_grpo_32',"
        " '--json']); print(sorted({'ray', 'sglang', 'megatron'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


def read_table() -> dict[str, list[str]]:
    """Return recipe -> further cells of the table in docs/sync.md."""
    lines = [line for line in read(Path("docs/sync.md")).splitlines() if line.startswith("| `")]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    return {recipe: cells for recipe, *cells in rows}


def test_the_table_in_the_document_has_every_large_recipe() -> None:
    assert sorted(read_table()) == sorted(LARGE)


@pytest.mark.parametrize("recipe", LARGE_BY_LANE)
def test_the_table_in_the_document_is_what_the_command_prints(recipe: str) -> None:
    plan = plan_of(recipe)
    gib = [
        plan["trainer_out_per_rank"][1],
        plan["direct_trainer_out_per_rank"][1],
        plan["engine_in_per_rank"][1],
        plan["busiest_link_bytes"],
        plan["lower_bound_bytes"],
    ]
    seconds = [plan[name] for name in ("seconds", "direct_seconds", "gather_broadcast_seconds")]
    assert read_table()[recipe] == [
        f"{plan['trainer_ranks']} to {plan['engine_ranks']}",
        f"{plan['model_bytes'] / 2**30:.1f}",
        *(f"{count / 2**30:.2f}" for count in gib),
        *(f"{value:.3f}" for value in seconds),
    ]


@pytest.mark.parametrize(
    ("link_bytes", "copy_bytes", "seconds"),
    [(1e9, 0, 0.08), (1e9, 3e9, 0.08), (1e9, 8e9, 0.16), (0, 4e9, 0.08)],
)
def test_a_sync_takes_as_long_as_its_busiest_link_or_copies(
    link_bytes: float, copy_bytes: float, seconds: float
) -> None:
    traffic = Traffic(Load.zero(2), Load.zero(2), 0)
    traffic.trainer.network_out[1] = int(link_bytes)
    traffic.engines.local_in[0] = int(copy_bytes)
    traffic.trainer.local_out[0] = int(copy_bytes) // 2
    assert find_busiest_copy(traffic) == copy_bytes
    assert predict_seconds(traffic, link_gbps=100, memory_gbps=400) == pytest.approx(seconds)


def test_the_summary_adds_up_and_the_tables_show_it() -> None:
    config = load_recipe("qwen3_30b_a3b_grpo_32", [])
    run = PlannedRun.make(config)
    deployment = make_deployment(run)
    summary, traffic = predict_sync(run, deployment)
    assert summary.network_bytes == traffic.network_bytes
    assert summary.trainer_out_per_rank == (
        min(traffic.trainer.network_out),
        max(traffic.trainer.network_out),
    )
    assert summary.seconds == predict_seconds(
        traffic, config.plan.link_gbps, config.plan.memory_gbps
    )
    assert summary.seconds >= summary.lower_bound_seconds
    flows = make_flows_table(config.model.path, deployment, traffic, summary)
    assert [str(column.header) for column in flows.columns] == [
        "from",
        "what",
        "to",
        "in all",
        "per rank",
    ]
    assert flows.row_count >= 1
    comparison = make_comparison_table(summary)
    *_, seconds = comparison.columns[1].cells
    assert seconds == f"{summary.seconds:.3f}"


def test_copies_for_differences_are_counted_per_host() -> None:
    without, shown = kept("auto")
    assert without == (0, 0) and "differences" not in shown
    (trainer, engine), shown = kept("always")
    assert "kept in a host's memory for differences: trainer " in shown
    run = PlannedRun.make(load_recipe("qwen3_30b_a3b_grpo_32", []))
    summary, traffic = predict_sync(run, make_deployment(run))
    assert trainer == summary.trainer_out_per_host[1] > 0
    assert engine * 2 >= sum(traffic.engines.network_in) > 0


def kept(delta: str) -> tuple[tuple[int, int], str]:
    run = PlannedRun.make(load_recipe("qwen3_30b_a3b_grpo_32", [f"sync.delta={delta}"]))
    summary, _ = predict_sync(run, make_deployment(run))
    shown = str(make_comparison_table(summary).caption)
    return (summary.trainer_kept_bytes, summary.engine_kept_bytes), shown
