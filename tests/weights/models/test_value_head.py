"""Twins with a value head: one number per token in place of log-probs, all else alike."""

import pytest

from mcore_rl.weights.models import LANGUAGE, VISION, family_of, refuse_unsupported
from mcore_rl.weights.models.table import Family
from mcore_rl.weights.models.value_head import (
    SCORE,
    add_value_head,
    find_stem,
    has_value_head,
    make_classifier,
)
from tests.support.megatron_layout import model_config


@pytest.mark.parametrize("family", LANGUAGE, ids=lambda family: family.architecture)
def test_a_twin_differs_in_the_output_layer_alone(family: Family) -> None:
    twin = make_classifier(family)
    stem = find_stem(family.architecture)
    assert twin.architecture == f"{stem}ForSequenceClassification"
    assert find_stem(twin.architecture) == stem
    assert family_of({"architectures": [twin.architecture]}).rules == twin.rules
    key = "output_layer.weight"
    assert twin.rules[:-1] == tuple(rule for rule in family.rules if rule.key != key)
    assert [tensor.name for tensor in twin.rules[-1].tensors] == [SCORE]
    assert twin.rules[-1].key == key
    assert twin.has_tower == family.has_tower == (family in VISION)


def test_a_model_gets_a_value_head_once() -> None:
    causal = model_config()
    critic = add_value_head(causal)
    assert not has_value_head(causal)
    assert has_value_head(critic)
    assert add_value_head(critic) == critic
    refuse_unsupported(critic)


def test_the_head_is_one_row_and_the_output_layer_is_gone() -> None:
    config = model_config(tie_word_embeddings=True)
    before = family_of(config).shapes(config)
    critic = add_value_head(config)
    after = family_of(critic).shapes(critic)
    assert after.keys() - before.keys() == {SCORE}
    assert after[SCORE] == (1, config["hidden_size"])
    assert before.items() <= after.items()


@pytest.mark.parametrize(
    ("labels", "message"),
    [(None, "gives 2 numbers per token"), ({"0": "a", "1": "b", "2": "c"}, "gives 3 numbers")],
)
def test_a_head_of_several_labels_is_refused(labels: dict[str, str] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refuse_unsupported(add_value_head(model_config()) | {"id2label": labels})


def test_a_critic_of_a_vision_language_model_keeps_tower_and_settings() -> None:
    vision = {"vision_config": {"depth": 2}, "text_config": {"hidden_size": 8}}
    critic = add_value_head({"architectures": ["KimiVLForConditionalGeneration"], **vision})
    assert critic["architectures"] == ["KimiVLForSequenceClassification"]
    assert vision.items() <= critic.items()


def test_an_architecture_without_an_output_layer_cannot_be_a_critic() -> None:
    with pytest.raises(ValueError, match="Qwen3Model cannot be a critic: only"):
        add_value_head({"architectures": ["Qwen3Model"]})
