"""verl's advantages, losses, KL, correction and critic as options of a recipe."""

import math
from typing import Any

import pytest

import mcore_rl.algo.advantages
import mcore_rl.algo.losses  # noqa: F401
from mcore_rl.algo.aggregation import AGGREGATIONS as OUR_AGGREGATIONS
from mcore_rl.algo.registry import advantages, losses
from mcore_rl.tools.translate.verl_algorithm import (
    ADVANTAGES,
    AGGREGATIONS,
    ESTIMATORS,
    LOSSES,
)
from mcore_rl.tools.translate.verl_shared import ACTOR
from tests.tools.translate.accounts import decided, values
from tests.tools.translate.verl_options import translate

A = ACTOR.replace(".", "__")


def of(**given: Any) -> dict[str, Any]:
    return values(translate(**given))


def test_the_names_of_the_tables_are_registered() -> None:
    assert set(AGGREGATIONS.values()) <= set(OUR_AGGREGATIONS.names)
    assert set(LOSSES.values()) <= set(losses.names)
    assert set(ADVANTAGES.values()) <= set(advantages.names)
    assert set(ESTIMATORS.values()) == {"k1", "k2", "k3", "abs"}


@pytest.mark.parametrize(
    ("given", "advantage"),
    [
        ({"adv_estimator": "grpo"}, "grpo"),
        ({"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False}, "dr_grpo"),
        ({"adv_estimator": "grpo_passk"}, "grpo_pass_k"),
        ({}, "gae"),
        ({"adv_estimator": "own"}, None),
    ],
)
def test_advantages(given: dict[str, Any], advantage: str | None) -> None:
    translation = translate(**{f"algorithm__{name}": value for name, value in given.items()})
    assert values(translation).get("algorithm.advantage") == advantage
    assert ("algorithm.adv_estimator" in decided(translation)) == (advantage is None)


@pytest.mark.parametrize("mode", LOSSES)
def test_a_loss_gets_no_option_that_it_does_not_read(mode: str) -> None:
    found = of(**{f"{A}__policy_loss__loss_mode": mode})
    assert found["algorithm.loss"] == LOSSES[mode]
    assert not losses.unread_by(LOSSES[mode]).keys() & found.keys()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_advantage_gets_no_option_that_it_does_not_read(name: str) -> None:
    found = of(algorithm__adv_estimator=name, algorithm__gamma=0.9, algorithm__lam=0.9)
    assert not advantages.unread_by(found["algorithm.advantage"]).keys() & found.keys()


def test_losses_have_verls_clips() -> None:
    found = of()
    clips = [found[f"algorithm.{name}"] for name in ("clip_low", "clip_high", "dual_clip")]
    assert clips == [0.2, 0.2, 3.0]
    gspo = of(**{f"{A}__policy_loss__loss_mode": "gspo", f"{A}__clip_ratio_high": 4e-4})
    assert gspo["algorithm.loss"] == "gspo" and gspo["algorithm.clip_high"] == 4e-4
    assert "algorithm.dual_clip" not in gspo
    kl_cov = of(**{f"{A}__policy_loss__loss_mode": "kl_cov"})
    assert kl_cov["algorithm.covariance.kl_coef"] == 0.1
    assert "algorithm.covariance.low" not in kl_cov


def test_sums_of_sequences_are_divided_by_the_longest() -> None:
    mode = f"{A}__loss_agg_mode"
    norm = translate(**{mode: "seq-mean-token-sum-norm"})
    assert values(norm)["algorithm.aggregation"] == "constant"
    assert f"{ACTOR}.loss_agg_mode" not in decided(norm)
    assert f"{ACTOR}.loss_agg_mode" in decided(translate(**{mode: "seq-mean-token-sum"}))
    scaled = translate(**{mode: "seq-mean-token-sum-norm", f"{A}__loss_scale_factor": 3000})
    assert f"{ACTOR}.loss_scale_factor" in decided(scaled)


def test_a_kl_is_in_the_loss_or_in_the_reward() -> None:
    in_loss = of(**{f"{A}__use_kl_loss": True, f"{A}__kl_loss_type": "low_var_kl+"})
    assert in_loss["algorithm.kl.coef"] == 0.001
    assert in_loss["algorithm.kl.estimator"] == "k3+"
    assert "algorithm.kl.in_reward" not in in_loss
    assert "algorithm.clip_high" not in of(actor_rollout_ref__actor__policy_loss__loss_mode="gpg")
    no_reward = of(algorithm__use_kl_in_reward=True, algorithm__kl_ctrl__kl_coef=0)
    assert "algorithm.kl.in_reward" not in no_reward
    in_reward = of(algorithm__use_kl_in_reward=True, algorithm__kl_ctrl__type="adaptive")
    wanted = {"coef": 0.001, "estimator": "k1", "in_reward": True, "target": 0.1, "horizon": 10000}
    assert {name: in_reward[f"algorithm.kl.{name}"] for name in wanted} == wanted
    unused = translate(algorithm__kl_ctrl__kl_coef=0.5)
    assert "algorithm.kl.coef" not in values(unused)
    assert "algorithm.kl_ctrl.kl_coef" in {item.source for item in unused.unneeded}


def test_corrections() -> None:
    group = "algorithm__rollout_correction__"
    token = of(**{f"{group}rollout_is": "token", f"{group}rollout_is_threshold": 5.0})
    assert token["algorithm.correction.weight"] == "token"
    assert token["algorithm.correction.high"] == 5.0
    bypass = translate(**{f"{group}bypass_mode": True, f"{group}loss_type": "reinforce"})
    assert values(bypass)["algorithm.correction.bypass"] is True
    assert "algorithm.rollout_correction.loss_type" in decided(bypass)
    masked = of(**{f"{group}rollout_is": "token", f"{group}rollout_is_threshold": "0.5_5.0"})
    assert masked["algorithm.correction.bound"] == "mask"
    assert (masked["algorithm.correction.low"], masked["algorithm.correction.high"]) == (0.5, 5.0)
    normal = of(**{f"{group}rollout_is": "token", f"{group}rollout_is_batch_normalize": True})
    assert normal["algorithm.correction.normalize"] is True


@pytest.mark.parametrize(
    ("criterion", "threshold", "ours"),
    [
        ("token_k1", "0.5_2.0", ("token", "k1", math.log(2), math.log(0.5))),
        ("seq_sum_k1", 2.0, ("sequence_sum", "k1", math.log(2), None)),
        ("seq_mean_k3", 0.01, ("sequence", "k3", 0.01, None)),
        ("seq_max_k2", "0.3", ("sequence_max", "k2", 0.3, None)),
    ],
)
def test_a_criterion_of_rejection(criterion: str, threshold: Any, ours: tuple[Any, ...]) -> None:
    group = "algorithm__rollout_correction__"
    given = {f"{group}rollout_rs": criterion, f"{group}rollout_rs_threshold": threshold}
    found = of(**given)
    names = ("reject", "reject_estimator", "reject_above", "reject_below")
    assert tuple(found.get(f"algorithm.correction.{name}") for name in names) == ours
    bypassed = translate(**given, **{f"{group}bypass_mode": True})
    assert "algorithm.rollout_correction.rollout_rs" in decided(bypassed)


def test_several_criteria_of_rejection_are_left_to_decide() -> None:
    group = "algorithm__rollout_correction__"
    given = {f"{group}rollout_rs": "token_k1,seq_max_k2", f"{group}rollout_rs_threshold": 2.0}
    assert "algorithm.rollout_correction.rollout_rs" in decided(translate(**given))


def test_dro_and_the_baseline_of_turns() -> None:
    found = of(**{f"{A}__policy_loss__loss_mode": "dro", f"{A}__policy_loss__dro_beta": 0.2})
    assert (found["algorithm.loss"], found["algorithm.dro_beta"]) == ("dro", 0.2)
    name = "tir_optimal_token_baseline"
    assert of(algorithm__adv_estimator=name)["algorithm.advantage"] == name


def test_dynamic_sampling() -> None:
    group = "algorithm__filter_groups__"
    given: dict[str, Any] = {f"{group}enable": True, f"{group}max_num_gen_batches": 10}
    found = of(**given, data__gen_batch_size=1536, data__train_batch_size=512)
    assert found["rollout.dynamic_sampling"] and found["rollout.max_rounds"] == 10
    assert found["rollout.oversampling"] == 3


def test_the_critic_belongs_to_gae() -> None:
    given = {"critic__optim__lr": 2e-5, "trainer__critic_warmup": 7, "algorithm__lam": 0.95}
    found = of(**given)
    assert found["critic.optimizer.lr"] == 2e-5 and found["critic.warmup_steps"] == 6
    assert found["algorithm.gae_lambda"] == found["critic.gae_lambda"] == 0.95
    without = translate(**given, algorithm__adv_estimator="grpo")
    assert not any(key.startswith("critic.") for key in values(without))
    assert {name.replace("__", ".") for name in given} <= {u.source for u in without.unneeded}


def test_a_critic_may_have_low_rank_factors() -> None:
    found = of(critic__model__lora_rank=32)
    assert found["critic.lora.rank"] == 32 and found["critic.lora.alpha"] == 16.0
    assert "critic.lora.targets" not in found and "critic.lora.rank" not in of()
    given: dict[str, Any] = {"rank": 8, "alpha": 4}
    lora = {f"critic__model__lora_{name}": value for name, value in given.items()}
    named = {
        "critic__model__target_modules": ["q_proj", "v_proj"],
        "critic__model__exclude_modules": "o_proj",
    }
    translation = translate(**lora, **named)
    found = values(translation)
    assert found["critic.lora.alpha"] == 4.0 and found["critic.lora.targets"] == [
        "q_proj",
        "v_proj",
    ]
    assert "critic.model.exclude_modules" in decided(translation)


def test_one_teacher_is_the_recipes_own() -> None:
    model = "distillation__teacher_models__teacher_model__"
    given: dict[str, Any] = {
        "distillation__enabled": True,
        "algorithm__adv_estimator": "grpo",
        "actor_rollout_ref__rollout__n": 1,
        f"{model}model_path": "org/teacher",
        f"{model}inference__tensor_model_parallel_size": 2,
    }
    coef = {"distillation__distillation_loss__distillation_loss_coef": 4.0}
    translation = translate(**given, **coef)
    found = values(translation)
    assert found["algorithm.advantage"] == "distillation" and found["algorithm.reward_coef"] == 0.25
    assert (found["teacher.path"], found["teacher.tp"]) == ("org/teacher", 2)
    assert "distillation.distillation_loss.loss_mode" in decided(translation)
    assert translation.explain_refusal() is None
    without = of(**{f"{model}model_path": "org/teacher"})
    assert "teacher.path" not in without and "algorithm.reward_coef" not in without


def test_several_teachers_are_left_to_the_user() -> None:
    names = [f"distillation__teacher_models__{name}__model_path" for name in ("math", "code")]
    translation = translate(distillation__enabled=True, **dict.fromkeys(names, "org/teacher"))
    [named] = [d.value for d in translation.decisions if d.source == "distillation.enabled"]
    assert named == ["org/teacher", "org/teacher"]
    assert not {"teacher.path", "algorithm.reward_coef"} & values(translation).keys()
