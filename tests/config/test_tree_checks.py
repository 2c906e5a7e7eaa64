"""Options of different groups that contradict one another are refused with a remedy."""

from dataclasses import replace
from typing import Any

import pytest

from mcore_rl.config.algorithm import AlgorithmConfig, CorrectionConfig
from mcore_rl.config.rollout import DriftConfig, RolloutConfig, ServedModelConfig
from mcore_rl.config.run import RecoveryConfig, RewardConfig
from mcore_rl.config.training import (
    CriticConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)
from mcore_rl.config.tree_checks import (
    check_colocated,
    check_colocated_models,
    check_fake_quantization,
    check_overlong,
    check_quantization,
    check_recovery,
    check_replay,
    check_steps,
    find_unread_in_recovery,
)


def test_weights_are_quantized_from_bfloat16() -> None:
    fp8 = RolloutConfig(quantization="fp8")
    check_quantization(fp8, ModelConfig(dtype="bfloat16"), TrainConfig())
    check_quantization(RolloutConfig(), ModelConfig(dtype="float32"), TrainConfig())
    with pytest.raises(ValueError, match=r"model.dtype=float32: needs model.dtype=bfloat16"):
        check_quantization(fp8, ModelConfig(dtype="float32"), TrainConfig())


@pytest.mark.parametrize(
    ("rollout", "train", "reason"),
    [
        (
            RolloutConfig(quantization="int4", sglang={"moe_runner_backend": "marlin"}),
            TrainConfig(),
            r"with rollout.sglang.moe_runner_backend=marlin: .* set it to triton, or",
        ),
        (
            RolloutConfig(quantization="int4", sglang={"moe_a2a_backend": "deepep"}),
            TrainConfig(),
            r"with rollout.sglang.moe_a2a_backend=deepep: .* set it to none, or",
        ),
        (
            RolloutConfig(quantization="int4"),
            TrainConfig(lora=LoraConfig(rank=8)),
            r"with train.lora.rank=8: engines merge factors into no weights in INT4",
        ),
    ],
)
def test_experts_in_int4_are_served_by_one_kernel(
    rollout: RolloutConfig, train: TrainConfig, reason: str
) -> None:
    model = ModelConfig(dtype="bfloat16")
    with pytest.raises(ValueError, match=f"rollout.quantization=int4 {reason}"):
        check_quantization(rollout, model, train)
    check_quantization(replace(rollout, sglang={}), model, TrainConfig())


def test_engines_compute_with_the_weights_that_train() -> None:
    plain, fp8 = RolloutConfig(), RolloutConfig(quantization="fp8")
    check_fake_quantization(TrainConfig(), fp8)
    check_fake_quantization(TrainConfig(fake_quantization="fp8"), fp8)
    for precision in ("fp8", "int4"):
        check_fake_quantization(TrainConfig(fake_quantization=precision), plain)
    with pytest.raises(
        ValueError,
        match=r"train.fake_quantization=int4 with rollout.quantization=fp8: .* other weights than"
        r" training; set train.fake_quantization=fp8, or rollout.quantization=none",
    ):
        check_fake_quantization(TrainConfig(fake_quantization="int4"), fp8)
    with_factors = TrainConfig(fake_quantization="fp8", lora=LoraConfig(rank=8))
    with pytest.raises(ValueError, match=r"train.fake_quantization=fp8 with train.lora.rank=8: "):
        check_fake_quantization(with_factors, plain)


@pytest.mark.parametrize(
    "correction",
    [CorrectionConfig(weight="token"), CorrectionConfig(bypass=True)],
    ids=["weight", "bypass"],
)
def test_stale_samples_are_corrected_by_something(correction: CorrectionConfig) -> None:
    rollout = RolloutConfig(mode="async", stale="correct")
    check_steps(AlgorithmConfig(correction=correction), rollout, TrainConfig(), CriticConfig())
    with pytest.raises(ValueError, match=r"set algorithm.correction.weight=token, or "):
        check_steps(AlgorithmConfig(), rollout, TrainConfig(), CriticConfig())


@pytest.mark.parametrize("mode", ["one_step_off", "async"])
def test_samples_of_older_weights_want_a_correction_or_none_by_name(mode: str) -> None:
    def check(correction: CorrectionConfig, mode: Any) -> None:
        algorithm = AlgorithmConfig(correction=correction)
        check_steps(algorithm, RolloutConfig(mode=mode), TrainConfig(), CriticConfig())

    for chosen in ("token", "sequence", "geometric", "none"):
        check(CorrectionConfig(weight=chosen), mode)
    check(CorrectionConfig(bypass=True), mode)
    check(CorrectionConfig(), "sync")
    message = (
        f"rollout.mode={mode} without algorithm.correction.weight: .* with one optimizer step"
        r" \(train.mini_batches \* train.epochs = 1 here\) it is 1 however stale .* Choose"
        r" algorithm.correction.weight=token, .* or weight=none for no correction$"
    )
    with pytest.raises(ValueError, match=message):
        check(CorrectionConfig(), mode)
    with pytest.raises(ValueError, match=message):
        check(CorrectionConfig(reject="token", reject_above=0.1), mode)


def test_mini_batches_divide_the_samples_of_a_step() -> None:
    rollout = RolloutConfig(prompts_per_step=4, samples_per_prompt=3)
    algorithm = AlgorithmConfig()
    check_steps(algorithm, rollout, TrainConfig(mini_batches=6), CriticConfig(mini_batches=4))
    with pytest.raises(ValueError, match=r"= 12 is not divisible by train.mini_batches=5"):
        check_steps(algorithm, rollout, TrainConfig(mini_batches=5), CriticConfig())
    with pytest.raises(ValueError, match=r"= 12 is not divisible by critic.mini_batches=7"):
        check_steps(algorithm, rollout, TrainConfig(), CriticConfig(mini_batches=7))


def test_the_overlong_buffer_lies_within_the_response() -> None:
    check_overlong(RewardConfig(overlong_buffer_len=16), RolloutConfig(max_response_len=16))
    with pytest.raises(ValueError, match=r"overlong_buffer_len=17 exceeds .*max_response_len=16"):
        check_overlong(RewardConfig(overlong_buffer_len=17), RolloutConfig(max_response_len=16))


def test_experts_are_replayed_from_engines_that_are_asked_for_them() -> None:
    check_replay(TrainConfig(router_replay="engine"), DriftConfig())
    check_replay(TrainConfig(indexer_replay="engine"), DriftConfig(indexer_topk=True))
    with pytest.raises(ValueError, match=r"indexer_replay=engine.*set drift.indexer_topk=true"):
        check_replay(TrainConfig(indexer_replay="engine"), DriftConfig())
    check_replay(TrainConfig(router_replay="old_pass"), DriftConfig(routed_experts=False))
    with pytest.raises(ValueError, match=r"train.router_replay=engine .* set drift.routed"):
        check_replay(TrainConfig(router_replay="engine"), DriftConfig(routed_experts=False))


def test_a_colocated_model_has_as_many_ranks_as_the_trainer_at_most_and_scores_in_turn() -> None:
    model = ServedModelConfig(path="/m", colocated=True, restarts=0, engines=2, tp=2)
    check_colocated_models({"judge": model}, ParallelConfig(dp=4), RolloutConfig())
    apart = ServedModelConfig(path="/m", engines=9)
    check_colocated_models({"judge": apart}, ParallelConfig(), RolloutConfig(mode="async"))
    with pytest.raises(ValueError, match=r"judge.pp = 4: there are parallel.world_size=3 trainer"):
        check_colocated_models({"judge": model}, ParallelConfig(dp=3), RolloutConfig())
    with pytest.raises(ValueError, match=r"rollout.mode=async: .* or judge.colocated=false"):
        check_colocated_models({"judge": model}, ParallelConfig(dp=4), RolloutConfig(mode="async"))


def test_a_smaller_layout_must_be_possible() -> None:
    layouts = {"parallel": ParallelConfig(dp=4), "critic.parallel": ParallelConfig(dp=2)}
    check_recovery(RecoveryConfig(), layouts)
    check_recovery(RecoveryConfig(min_dp=1), layouts)
    check_recovery(RecoveryConfig(min_dp=2), {"parallel": ParallelConfig(ep=2, dp=4)})
    with pytest.raises(ValueError, match=r"min_dp=2 is no smaller .* than critic.parallel.dp=2"):
        check_recovery(RecoveryConfig(min_dp=2), layouts)
    with pytest.raises(ValueError, match=r"from parallel.dp=1 to 1 .* parallel.ep .* = 2 does not"):
        check_recovery(RecoveryConfig(min_dp=1), {"parallel": ParallelConfig(ep=2, dp=2)})
    [unread] = find_unread_in_recovery(RecoveryConfig(partner="none", min_dp=1))
    assert unread.options == ("run.recovery.min_dp",)


COLOCATED: dict[str, Any] = {"tp": 2, "stage_weights": False, "restarts": 0}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"engines": 2}, r"rollout.pp = 4: there are parallel.world_size=2 trainer ranks"),
        ({"mode": "async"}, r"rollout.mode=async: .* set rollout.mode=sync$"),
        ({"stage_weights": True}, r"rollout.stage_weights=True: .* set rollout.stage_w"),
        ({"restarts": 1}, r"rollout.restarts=1: .* set rollout.restarts=0$"),
    ],
)
def test_engines_on_the_trainers_gpus_work_in_turn_within_its_memory(
    changed: dict[str, Any], message: str
) -> None:
    parallel = ParallelConfig(dp=2)
    check_colocated(parallel, RolloutConfig(**COLOCATED))
    with pytest.raises(ValueError, match=f"^cluster.colocated=true with (.* )?{message}"):
        check_colocated(parallel, RolloutConfig(**{**COLOCATED, **changed}))
