"""The plan of low-rank factors by hand, and what it says of the host."""

import json

import pytest

from mcore_rl.cli import main
from mcore_rl.config.recipe import load_recipe
from mcore_rl.planning.adapter_memory import explain_frozen, list_frozen_bytes
from mcore_rl.planning.memory import predict_memory
from mcore_rl.planning.recipe_models import PlannedRun

QWEN = "qwen3_30b_a3b_grpo_32"
LAYOUT = ["rollout.mode=sync", "parallel.dp=8", "parallel.tp=1", "parallel.ep=8"]
PLAIN = ["train.ddp.overlap_grad_reduce=false"]
for name in ("use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype"):
    PLAIN.append(f"train.optimizer.megatron.{name}=null")
LORA = [*LAYOUT, *PLAIN, "train.lora.rank=32"]
EXPERTS = 48 * 128 * 3 * 2048 * 768
ATTENTION = 48 * 2048 * (2 * 4096 + 2 * 512)


def plan(*settings: str) -> PlannedRun:
    return PlannedRun.make(load_recipe(QWEN, [*LORA, *settings]))


def uses(run: PlannedRun) -> dict[str, float]:
    return dict(next(rank.uses for rank in predict_memory(run) if rank.side == "trainer"))


def test_states_are_those_of_the_factors() -> None:
    expert = 32 * 48 * 16 * 3 * (2048 + 768)
    dense = 32 * 48 * (2 * (2048 + 4096) + 2 * (2048 + 512))
    found = uses(plan())
    weights = 30.53e9 - EXPERTS * 7 / 8 + expert + dense
    assert found["weights"] == pytest.approx(2 * weights, rel=1e-3)
    largest = 2 * 16 * 2 * 2048 * 768
    assert found["gradients"] == 4 * (expert + dense) + largest
    assert found["optimizer"] == 12 * (expert + dense / 8)


def test_attention_alone_costs_little() -> None:
    dense = 32 * 48 * (2 * (2048 + 4096) + 2 * (2048 + 512))
    run = plan("train.lora.experts=false")
    assert uses(run)["optimizer"] == 12 * dense / 8
    assert list_frozen_bytes(run) == [2 * ATTENTION]


def test_the_host_holds_what_lies_below_the_factors() -> None:
    run = plan()
    assert list_frozen_bytes(run) == [2 * (ATTENTION + EXPERTS // 8)]
    assert "at most 8.4 GiB for each trainer rank, 67.5 GiB for the 8" in explain_frozen(run)
    without = PlannedRun.make(load_recipe(QWEN, LAYOUT))
    assert (list_frozen_bytes(without), explain_frozen(without)) == ([], "")


def test_the_plan_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", f"recipe={QWEN}", *LORA])
    assert "Frozen weights below the factors (train.lora.rank=32)" in capsys.readouterr().out
    main(["plan", f"recipe={QWEN}", *LORA, "--json"])
    assert json.loads(capsys.readouterr().out)["frozen_bytes"] == [2 * (ATTENTION + EXPERTS // 8)]
