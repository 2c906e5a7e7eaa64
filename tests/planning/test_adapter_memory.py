"""The plan of low-rank factors by hand, and what it says of the host."""

import json

import pytest

from mcore_rl.cli import main
from mcore_rl.config.recipe import load_recipe
from mcore_rl.planning.adapter_memory import (
    MergedSize,
    count_merged,
    explain_engines,
    explain_frozen,
    list_frozen_bytes,
    list_frozen_critic_bytes,
)
from mcore_rl.planning.deployment import make_deployment
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


def test_a_critics_weights_are_frozen_on_its_own_host() -> None:
    critic = ["algorithm.advantage=gae", "critic.parallel.dp=8", "critic.parallel.ep=8"]
    run = PlannedRun.make(load_recipe(QWEN, [*LAYOUT, *PLAIN, *critic, "critic.lora.rank=32"]))
    assert list_frozen_critic_bytes(run) == [2 * (ATTENTION + EXPERTS // 8)]
    said = explain_frozen(run)
    assert "(critic.lora.rank=32), in host memory: at most 8.4 GiB for each critic rank" in said
    assert "trainer rank" not in said
    own = next(rank.uses for rank in predict_memory(run) if rank.side == "critic")
    dense = 32 * 48 * (2 * (2048 + 4096) + 2 * (2048 + 512)) + 2048
    expert = 32 * 48 * 16 * 3 * (2048 + 768)
    assert own["optimizer"] == 12 * (expert + dense / 8)


def test_a_critic_on_the_trainers_gpus_shares_what_both_adapt() -> None:
    shared = ["algorithm.advantage=gae", "critic.colocated=true", "critic.lora.rank=8"]
    shared += ["critic.parallel.dp=8", "critic.parallel.ep=8"]
    attention = "train.lora.targets=[q_proj,k_proj,v_proj,o_proj]"
    assert list_frozen_critic_bytes(plan(*shared)) == [0]
    assert explain_frozen(plan(*shared)).endswith("that both adapt.")
    assert list_frozen_critic_bytes(plan(*shared, attention)) == [2 * EXPERTS // 8]
    other_layout = plan(*shared[:3], "critic.parallel.dp=4", "critic.parallel.ep=4")
    assert list_frozen_critic_bytes(other_layout) == [2 * (ATTENTION + EXPERTS // 4)]


def engine_uses(run: PlannedRun) -> dict[str, float]:
    return dict(next(rank.uses for rank in predict_memory(run) if rank.side == "engine"))


def test_engines_keep_what_they_merge_factors_into() -> None:
    """Each of an engine's two ranks holds half of attention and half of the experts."""
    run = plan("rollout.tp=2", "rollout.ep=2")
    dense = ATTENTION // 2
    halves = 48 * (2 * (2048 + 2048) + 2 * (2048 + 256))
    experts = 48 * 64 * 3 * (2048 + 768)
    factors = 2 * 32 * (halves + experts)
    assert count_merged(run, make_deployment(run).target, 0) == MergedSize(
        2 * (dense + EXPERTS // 2), factors
    )
    said = explain_engines(run)
    assert "keep in host memory: at most 27.8 GiB for each engine rank" in said
    assert f"brings {2 * factors / 2**20:.0f} MiB to an engine" in said
    assert engine_uses(run)["factors"] == factors
    on_gpu = plan("rollout.tp=2", "rollout.ep=2", "train.lora.engine_base=gpu")
    assert engine_uses(on_gpu)["factors"] == factors + 2 * (dense + EXPERTS // 2)
    assert "in GPU memory" in explain_engines(on_gpu)
    merged = plan("train.lora.sync=merged")
    assert explain_engines(merged) == "" and "factors" not in engine_uses(merged)


def test_engines_that_serve_an_adapter_have_buffers_for_it_and_for_the_weights_alone() -> None:
    """By hand: q, k and v have a place though k is not adapted; each of two ranks cuts one side."""
    served = ["train.lora.sync=adapter", "train.lora.targets=[q_proj,v_proj,o_proj]"]
    run = plan("rollout.tp=2", "rollout.ep=2", *served)
    outputs = (4096 + 2 * 512) // 2
    sides = 48 * (3 * 2048 + outputs + 4096 // 2 + 2048)
    assert engine_uses(run)["buffers of adapters"] == 2 * 2 * 32 * sides


def test_adapters_that_take_turns_add_up() -> None:
    own = ["train.lora.sync=adapter", "train.lora.experts=false", "data.train=[]", "eval.data=[]"]
    own.append("train.lora.targets=[q_proj,k_proj,v_proj,o_proj]")
    turns = "train.lora.adapters=[{name:a,rank:16},{name:b,rank:48}]"
    run, alone = plan(*own, turns), plan(*own, "train.lora.rank=64")
    assert uses(run) == uses(alone)
    assert list_frozen_bytes(run) == list_frozen_bytes(alone) == [2 * ATTENTION]
    buffers = [engine_uses(each)["buffers of adapters"] for each in (run, alone)]
    assert buffers[0] / (3 * 48) == buffers[1] / (2 * 64)
    assert "Engines serve 2 adapters (train.lora.adapters)" in explain_engines(run)


def test_the_plan_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", f"recipe={QWEN}", *LORA])
    assert "Frozen weights below the factors (train.lora.rank=32)" in capsys.readouterr().out
    main(["plan", f"recipe={QWEN}", *LORA, "--json"])
    assert json.loads(capsys.readouterr().out)["frozen_bytes"] == [2 * (ATTENTION + EXPERTS // 8)]
