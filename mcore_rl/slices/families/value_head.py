"""Models whose output layer gives one number per token: critics, and HuggingFace's reward models.

A causal language model and its twin for sequence classification differ in the output layer alone.
"""

from dataclasses import replace
from typing import Any

from mcore_rl.slices.families.table import Family, HfConfig, HfTensor, Rule

CAUSAL, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"
SCORE = "score.weight"
"""HF name of the value head, [1, hidden]."""
_RULE = Rule("output_layer.weight", (HfTensor(SCORE, ("one", "hidden")),), where="model")


def classifier_of(family: Family) -> Family:
    """The table of a causal model's twin."""
    return replace(
        family,
        architecture=family.architecture.replace(CAUSAL, CLASSIFIER),
        rules=(*(rule for rule in family.rules if rule.key != _RULE.key), _RULE),
        sizes=lambda config: {**family.sizes(config), "one": 1},
        refusal=lambda config: _too_many_labels(config) or family.refusal(config),
        tied={},
    )


def has_value_head(config: HfConfig) -> bool:
    """Whether config.json is of a model that gives a number per token instead of log-probs."""
    return any(name.endswith(CLASSIFIER) for name in config.get("architectures") or ())


def with_value_head(config: HfConfig) -> dict[str, Any]:
    """config.json of the same model with a value head; unchanged where it has one."""
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
