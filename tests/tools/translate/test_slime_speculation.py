"""How slime's engines guess tokens, as options of a recipe."""

from typing import Any

import pytest

from tests.tools.translate.accounts import decided, told, values
from tests.tools.translate.peer_options import slime

BY_LAYER = {
    "sglang_speculative_algorithm": "EAGLE",
    "sglang_speculative_num_steps": 2,
    "sglang_speculative_eagle_topk": 1,
    "sglang_speculative_num_draft_tokens": 3,
}
TRAINED = {**BY_LAYER, "enable_mtp_training": True, "mtp_loss_scaling_factor": 0.2}
ENGINES = {"rollout_num_gpus_per_engine": 8, "rollout_num_gpus": 8}
BY_NGRAMS = {"sglang_speculative_algorithm": "NGRAM", "sglang_speculative_num_draft_tokens": 6}


GROUP = {"n_samples_per_prompt": 8}


def of(**given: Any) -> dict[str, Any]:
    return values(slime(**given))


def test_a_layer_that_learns_along_guesses() -> None:
    translation = slime(**TRAINED, **GROUP)
    found = values(translation)
    assert (found["rollout.speculate"], found["rollout.speculate_tokens"]) == ("mtp", 2)
    assert found["train.mtp_loss"] == 0.2 and "drift.routed_experts" not in found
    assert told(translation) >= {f"--{name.replace('_', '-')}" for name in TRAINED}
    assert translation.explain_refusal() is None
    assert of(enable_mtp_training=True)["train.mtp_loss"] == 0.1
    assert "train.mtp_loss" not in of(mtp_loss_scaling_factor=0.2)


def test_n_grams_guess_without_experts_that_are_compared() -> None:
    found = of(**BY_NGRAMS)
    assert (found["rollout.speculate"], found["rollout.speculate_tokens"]) == ("ngram", 5)
    assert found["drift.routed_experts"] is False and "train.mtp_loss" not in found
    assert slime(**BY_NGRAMS, **GROUP).explain_refusal() is None
    assert of(sglang_speculative_algorithm="NGRAM")["rollout.speculate_tokens"] == 11


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (BY_LAYER, "set rollout.speculate=mtp and train.mtp_loss"),
        (TRAINED | ENGINES | {"sglang_dp_size": 8}, "with --sglang-dp-size: set rollout.attention"),
        (BY_NGRAMS | ENGINES | {"sglang_pp_size": 2}, "with --sglang-pp-size: set rollout.pp=1"),
        (TRAINED | {"hf_checkpoint": "/m/DeepSeek-FP8"}, "set rollout.quantization=none"),
        (TRAINED | {"sglang_speculative_eagle_topk": 4}, "a guess follows the one before"),
        ({"sglang_speculative_algorithm": "NEXTN", "enable_mtp_training": True}, "the one before"),
        ({"sglang_speculative_algorithm": "EAGLE3"}, "rollout.speculate is ngram, or mtp"),
        (BY_NGRAMS | {"use_rollout_routing_replay": True}, "and train.router_replay=none"),
    ],
)
def test_what_no_engine_of_a_recipe_guesses_with_is_left_to_the_user(
    given: dict[str, Any], advice: str
) -> None:
    translation = slime(**given, **GROUP)
    name = "--sglang-speculative-algorithm"
    [decision] = [item for item in translation.decisions if name in item.source.split(", ")]
    assert advice in decision.advice and "rollout.speculate" not in values(translation)
    asked = {f"--{key.replace('_', '-')}" for key in given if "speculative" in key}
    assert asked <= decided(translation)
    assert translation.explain_refusal() is None


def test_other_options_of_guessing_engines_are_handed_on() -> None:
    name = "speculative_draft_attention_backend"
    assert of(**TRAINED, **{f"sglang_{name}": "flashinfer"})[f"rollout.sglang.{name}"]
