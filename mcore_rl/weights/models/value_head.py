"""Models whose output layer gives one value per token: critics, and HuggingFace's reward models.

A language model and its twin for sequence classification differ in the output layer alone:

    ...ForCausalLM, ...ForConditionalGeneration   lm_head.weight [vocab, hidden] -> log-probs
    ...ForSequenceClassification                  score.weight   [1, hidden]     -> one value

The twin of a vision-language model has its tower, too. transformers has a class of that name for
Qwen3.5 alone.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_rl.weights.models.table import Family, HfConfig, HfTensor, Rule

CAUSAL = "ForCausalLM"
GENERATIVE = "ForConditionalGeneration"
"""How architectures of models that see images end."""
CLASSIFIER = "ForSequenceClassification"
SCORE = "score.weight"
"""HF name of the value head, of shape [1, hidden]."""
VALUE_HEAD = "output_layer.weight"
"""Megatron's name of its weight, which an output layer for tokens has, too."""
_RULE = Rule(VALUE_HEAD, (HfTensor(SCORE, ("one", "hidden")),), where="model")


def make_classifier(family: Family) -> Family:
    """Return the family of a language model's twin with a value head."""
    return replace(
        family,
        architecture=find_stem(family.architecture) + CLASSIFIER,
        rules=(*(rule for rule in family.rules if rule.key != _RULE.key), _RULE),
        sizes=lambda config: {**family.sizes(config), "one": 1},
        refusal=lambda config: _find_refusal(config) or family.refusal(config),
        tied={},
    )


TEXT_STEMS: Mapping[str, str] = {
    "Qwen3_5ForCausalLM": "Qwen3_5Text",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeText",
}
"""Language models whose twin cannot have their stem, which is that of the twin with a tower."""


def find_stem(architecture: str) -> str:
    """Return the name that an architecture shares with its twin: "Qwen3VL", "Qwen3Moe"."""
    if architecture in TEXT_STEMS:
        return TEXT_STEMS[architecture]
    for ending in (CAUSAL, GENERATIVE, CLASSIFIER):
        if architecture.endswith(ending):
            return architecture.removesuffix(ending)
    raise ValueError(
        f"{architecture} cannot be a critic: only ...{CAUSAL} and ...{GENERATIVE} have a twin with"
        " a value head; choose an algorithm without a critic, or another model as critic.path"
    )


def has_value_head(config: HfConfig) -> bool:
    """Return whether the model gives one value per token instead of log-probs."""
    return any(name.endswith(CLASSIFIER) for name in config.get("architectures") or ())


def find_value_head(config: HfConfig) -> str | None:
    """Return Megatron's name of the value head's weight; None if the model has none."""
    return VALUE_HEAD if has_value_head(config) else None


def add_value_head(config: HfConfig) -> dict[str, Any]:
    """Return config.json of the same model with a value head, which it may already have.

    Raises ValueError naming an architecture that has no twin with a value head.
    """
    architectures = [find_stem(name) + CLASSIFIER for name in config["architectures"]]
    return {
        **config,
        "architectures": architectures,
        "id2label": {"0": "value"},
        "label2id": {"value": 0},
    }


def _find_refusal(config: HfConfig) -> str:
    labels = config.get("id2label") or {"0": "", "1": ""}
    if len(labels) == 1:
        return ""
    return f"its head gives {len(labels)} numbers per token (id2label), a value head gives one"
