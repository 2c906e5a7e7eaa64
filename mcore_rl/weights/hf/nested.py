"""Reads config.json of a vision-language model as if the language model stood alone in it.

    config.json                                        in memory
    {"text_config": {"hidden_size": 64, ...},    ->    {"hidden_size": 64, ...,
     "vision_config": {...}, ...}                       "text_config": {...}, "vision_config": ...}

transformers 5 nests the language model's settings, the published files have them at the top.
"""

from typing import Any

from mcore_rl.weights.models.table import HfConfig

TEXT = "text_config"
OWN = frozenset({"architectures", "model_type", "dtype", "torch_dtype", "tie_word_embeddings"})
"""Settings that the whole model has at the top of config.json, whatever its parts say."""


def with_text_settings(config: HfConfig) -> dict[str, Any]:
    """Return config.json with the settings of its `text_config`, if any, at the top as well.

    A setting that stands at the top keeps its value.
    """
    return {**(config.get(TEXT) or {}), **config}


def without_text_settings(config: HfConfig) -> dict[str, Any]:
    """Return the config.json to write: settings that `text_config` repeats are in it alone."""
    text = config.get(TEXT) or {}
    return {
        key: value
        for key, value in config.items()
        if key in OWN or key not in text or text[key] != value
    }
