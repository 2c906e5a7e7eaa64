"""Twins with a value head: one number per token in place of log-probs, all else alike."""

import pytest

from mcore_rl.slices.families import CAUSAL, family_of, refuse_unsupported
from mcore_rl.slices.families.table import Family
from mcore_rl.slices.families.value_head import (
    SCORE,
    classifier_of,
    has_value_head,
    with_value_head,
)
from tests.support.megatron_layout import model_config


@pytest.mark.parametrize("family", CAUSAL, ids=lambda family: family.architecture)
def test_a_twin_differs_in_the_output_layer_alone(family: Family) -> None:
    twin = classifier_of(family)
    assert twin.architecture == family.architecture.replace("CausalLM", "SequenceClassification")
    key = "output_layer.weight"
    assert twin.rules[:-1] == tuple(rule for rule in family.rules if rule.key != key)
    assert [tensor.name for tensor in twin.rules[-1].tensors] == [SCORE]
    assert twin.rules[-1].key == key


def test_a_model_gets_a_value_head_once() -> None:
    causal = model_config()
    critic = with_value_head(causal)
    assert not has_value_head(causal)
    assert has_value_head(critic)
    assert with_value_head(critic) == critic
    refuse_unsupported(critic)


def test_the_head_is_one_row_and_the_output_layer_is_gone() -> None:
    config = model_config(tie_word_embeddings=True)
    before = family_of(config).shapes(config)
    critic = with_value_head(config)
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
        refuse_unsupported(with_value_head(model_config()) | {"id2label": labels})


def test_a_vision_language_model_cannot_be_a_critic() -> None:
    with pytest.raises(ValueError, match="Qwen2_5_VLForConditionalGeneration cannot be a critic"):
        with_value_head({"architectures": ["Qwen2_5_VLForConditionalGeneration"]})
