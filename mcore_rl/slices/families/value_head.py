"""Models whose output layer gives one value per token: critics, and HuggingFace's reward models.

A causal language model and its twin for sequence classification differ in the output layer alone:

    ...ForCausalLM                hidden states -> lm_head.weight [vocab, hidden] -> log-probs
    ...ForSequenceClassification  hidden states -> score.weight   [1, hidden]     -> one value
"""

from dataclasses import replace
from typing import Any

from mcore_rl.slices.families.table import Family, HfConfig, HfTensor, Rule

CAUSAL = "ForCausalLM"
CLASSIFIER = "ForSequenceClassification"
SCORE = "score.weight"
"""HF name of the value head, of shape [1, hidden]."""
_RULE = Rule("output_layer.weight", (HfTensor(SCORE, ("one", "hidden")),), where="model")


def classifier_of(family: Family) -> Family:
    """Return the family of a causal model's twin with a value head."""
    return replace(
        family,
        architecture=family.architecture.replace(CAUSAL, CLASSIFIER),
        rules=(*(rule for rule in family.rules if rule.key != _RULE.key), _RULE),
        sizes=lambda config: {**family.sizes(config), "one": 1},
        refusal=lambda config: _too_many_labels(config) or family.refusal(config),
        tied={},
    )


def has_value_head(config: HfConfig) -> bool:
    """Return whether the model gives one value per token instead of log-probs."""
    return any(name.endswith(CLASSIFIER) for name in config.get("architectures") or ())


def with_value_head(config: HfConfig) -> dict[str, Any]:
    """Return config.json of the same model with a value head, which it may already have.

    Raises ValueError naming an architecture that has no twin with a value head.
    """
    for name in config["architectures"]:
        if not name.endswith((CAUSAL, CLASSIFIER)):
            raise ValueError(
                f"{name} cannot be a critic: only ...{CAUSAL} has a twin with a value head; choose"
                " an algorithm without a critic, or a text model as critic.path"
            )
    architectures = [name.replace(CAUSAL, CLASSIFIER) for name in config["architectures"]]
    return {
        **config,
        "architectures": architectures,
        "id2label": {"0": "value"},
        "label2id": {"value": 0},
    }


def _too_many_labels(config: HfConfig) -> str:
    labels = config.get("id2label") or {"0": "", "1": ""}
    if len(labels) == 1:
        return ""
    return f"its head gives {len(labels)} numbers per token (id2label), a value head gives one"
