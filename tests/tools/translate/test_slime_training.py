"""slime's optimizer, batches and algorithm as options of a recipe."""

from typing import Any

import pytest

from mcore_rl.tools.translate.slime_training import ADVANTAGES, ESTIMATORS
from tests.tools.translate.accounts import decided, values
from tests.tools.translate.peer_options import slime


def of(**given: Any) -> dict[str, Any]:
    return values(slime(**given))


def test_mini_batches_are_counted_instead_of_their_samples() -> None:
    given = {"rollout_batch_size": 32, "n_samples_per_prompt": 8}
    assert of(**given)["train.mini_batches"] == 1
    assert of(**given, global_batch_size=64)["train.mini_batches"] == 4
    assert of(**given, num_steps_per_rollout=2)["train.mini_batches"] == 2
    assert "--global-batch-size" in decided(slime(**given, global_batch_size=100))
    assert "--rollout-batch-size" in decided(slime())


def test_micro_batches_are_counted_in_tokens() -> None:
    name = "train.max_tokens_per_microbatch"
    given = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 3000}
    assert of(**given, context_parallel_size=2)[name] == 6000
    longer = slime(**given, rollout_max_response_len=8000, rollout_max_prompt_len=100)
    assert values(longer)[name] == 8100 and "--max-tokens-per-gpu" in decided(longer)
    assert "--micro-batch-size" in decided(slime(micro_batch_size=2))
    assert "--use-dynamic-batch-size" in decided(slime(use_dynamic_batch_size=True))


def test_schedules_have_steps_and_a_least_rate() -> None:
    given: dict[str, Any] = {"lr": 1e-5, "lr_decay_style": "cosine", "min_lr": 1e-6}
    steps = {"rollout_batch_size": 32, "global_batch_size": 8, "num_rollout": 100}
    found = of(**given, lr_warmup_fraction=0.1, **steps)
    assert found["train.optimizer.schedule"] == "cosine"
    assert found["train.optimizer.min_lr"] == 1e-6
    assert found["train.optimizer.warmup_steps"] == 40
    assert "--lr-warmup-fraction" in decided(slime(lr_warmup_fraction=0.1))
    assert "--lr-decay-style" in decided(slime(lr_decay_style="WSD"))
    assert of()["train.optimizer.schedule"] == "linear"


@pytest.mark.parametrize("name", ADVANTAGES)
def test_estimators_of_advantages(name: str) -> None:
    found = of(advantage_estimator=name)
    assert found["algorithm.advantage"] == ADVANTAGES[name]
    assert ("critic.optimizer.lr" in found) == (name == "ppo")
    assert found["algorithm.loss"] == (name if name in ("gspo", "cispo") else "ppo_clip")


def test_dr_grpo_and_means() -> None:
    assert of(disable_grpo_std_normalization=True)["algorithm.advantage"] == "dr_grpo"
    assert of()["algorithm.aggregation"] == "sequence_mean"
    assert of(calculate_per_token_loss=True)["algorithm.aggregation"] == "token_mean"
    assert of(eps_clip=0.1)["algorithm.clip_high"] == 0.1
    assert of(eps_clip=0.1, eps_clip_high=0.3)["algorithm.clip_high"] == 0.3


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_a_kl_is_in_the_loss_or_in_the_reward(kind: str) -> None:
    found = of(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type=kind)
    assert found["algorithm.kl.coef"] == 0.1
    assert found["algorithm.kl.estimator"] == ESTIMATORS[kind]
    assert "algorithm.kl.in_reward" not in found
    assert of(kl_coef=0.2)["algorithm.kl.in_reward"]
    assert "algorithm.kl.coef" not in of()


def test_corrections_critics_and_distillation() -> None:
    found = of(use_tis=True, tis_clip=3.0)
    assert found["algorithm.correction.weight"] == "token"
    assert found["algorithm.correction.high"] == 3.0
    assert of(use_rollout_logprobs=True)["algorithm.correction.bypass"]
    critic = of(advantage_estimator="ppo", lambd=0.9, value_clip=0.3, num_critic_only_steps=5)
    assert critic["critic.gae_lambda"] == critic["algorithm.gae_lambda"] == 0.9
    assert critic["critic.value_clip"] == 0.3 and critic["critic.warmup_steps"] == 5
    distilled = slime(use_opd=True, opd_teacher_load="/teacher")
    assert {"--use-opd", "--opd-teacher-load"} <= decided(distilled)
    assert "algorithm.reward_coef" not in values(distilled), "refused without a teacher"
    assert "--loss-type" in decided(slime(loss_type="custom_loss"))


def test_experts_are_replayed() -> None:
    assert of(use_routing_replay=True)["train.router_replay"] == "old_pass"
    assert of(use_rollout_routing_replay=True)["train.router_replay"] == "engine"


def test_muon_has_its_options() -> None:
    found = of(optimizer="muon", muon_momentum=0.9)
    assert found["train.optimizer.name"] == "muon"
    assert found["train.optimizer.megatron.muon_momentum"] == 0.9


@pytest.mark.parametrize(
    ("name", "quantization", "is_told"),
    [
        ("M-FP8", "fp8", True),
        ("m-fp8/", "fp8", True),
        ("M-INT4", None, True),
        ("fp8/M", None, False),
    ],
)
def test_engines_serve_what_the_checkpoints_name_says(
    name: str, quantization: str | None, is_told: bool
) -> None:
    translation = slime(hf_checkpoint=f"/models/{name}")
    assert values(translation).get("rollout.quantization") == quantization
    assert ("--hf-checkpoint" in decided(translation)) == is_told


def test_adapters_of_a_fork_are_told() -> None:
    given = slime(lora_rank=32, lora_alpha=64, target_modules="all-linear")
    assert "--lora-rank" in decided(given)
    assert {item.source for item in given.unneeded} >= {"--lora-alpha", "--target-modules"}
    assert not decided(slime(lora_rank=0)) & {"--lora-rank"}
