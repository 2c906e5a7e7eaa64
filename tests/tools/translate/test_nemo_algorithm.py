"""NeMo-RL's advantages, losses and critic as options of a recipe."""

from typing import Any

import pytest

from mcore_rl.tools.translate.nemo_algorithm import NAMES
from tests.tools.translate.accounts import decided, values
from tests.tools.translate.peer_options import nemo


def of(**given: Any) -> dict[str, Any]:
    return values(nemo(**given))


@pytest.mark.parametrize(
    ("scaled", "others", "advantage"),
    [(True, True, "grpo"), (True, False, "grpo"), (False, True, "rloo"), (False, False, "dr_grpo")],
)
def test_two_switches_make_three_advantages(scaled: bool, others: bool, advantage: str) -> None:
    given = {"grpo__normalize_rewards": scaled, "grpo__use_leave_one_out_baseline": others}
    translation = nemo(**given)
    assert values(translation)["algorithm.advantage"] == advantage
    is_decided = "grpo.use_leave_one_out_baseline" in decided(translation)
    assert is_decided == (scaled and others)


def test_other_estimators() -> None:
    name = "grpo__adv_estimator__name"
    for kind in NAMES:
        assert of(**{name: kind})["algorithm.advantage"] == kind
    plus = {name: "reinforce_plus_plus"}
    assert of(**plus)["algorithm.advantage"] == "reinforce_plus_plus_baseline"
    plain = of(**plus, grpo__adv_estimator__minus_baseline=False)
    assert plain["algorithm.advantage"] == "reinforce_plus_plus"
    assert "grpo.adv_estimator.name" in decided(nemo(**{name: "opd"}))


@pytest.mark.parametrize(
    ("switch", "loss"),
    [
        ("use_cispo", "cispo"),
        ("disable_ppo_ratio", "policy_gradient"),
        ("sequence_level_importance_ratios", "gspo"),
        (None, "ppo_clip"),
    ],
)
def test_losses(switch: str | None, loss: str) -> None:
    given = {f"loss_fn__{switch}": True} if switch else {}
    assert of(**given)["algorithm.loss"] == loss


def test_means_clips_and_kl() -> None:
    given: dict[str, Any] = {"token_level_loss": False, "ratio_clip_c": 3, "use_kl_in_reward": True}
    given |= {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k2"}
    found = of(**{f"loss_fn__{name}": value for name, value in given.items()})
    assert found["algorithm.aggregation"] == "sequence_mean" and found["algorithm.dual_clip"] == 3
    assert found["algorithm.kl.coef"] == 0.1 and found["algorithm.kl.estimator"] == "k2"
    assert found["algorithm.kl.in_reward"] and of()["algorithm.kl.coef"] == 0.01


@pytest.mark.parametrize(
    ("kind", "bound", "is_decided"),
    [("tis", None, False), ("icepop", "mask", False), ("seq-mask-tis", None, True)],
)
def test_corrections(kind: str, bound: str | None, is_decided: bool) -> None:
    ratio = "loss_fn__truncated_importance_sampling"
    given: dict[str, Any] = {f"{ratio}_type": kind, f"{ratio}_ratio": 5.0}
    translation = nemo(**given, loss_fn__use_importance_sampling_correction=True)
    found = values(translation)
    assert found["algorithm.correction.weight"] == "token"
    assert found["algorithm.correction.high"] == 5.0
    assert found.get("algorithm.correction.bound") == bound
    name = "loss_fn.truncated_importance_sampling_type"
    assert (name in decided(translation)) == is_decided


def test_the_critic_of_ppo() -> None:
    given = {"ppo__adv_estimator__gae_lambda": 0.9, "ppo__policy_training_start_step": 5}
    translation = nemo(**given, value__model_name="org/critic", value_loss_fn__scale=0.4)
    found = values(translation)
    assert found["critic.gae_lambda"] == found["algorithm.gae_lambda"] == 0.9
    assert found["critic.warmup_steps"] == 5 and found["critic.path"] == "org/critic"
    assert "value_loss_fn.scale" in decided(translation)
