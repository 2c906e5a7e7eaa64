"""Parses the config.json of a HuggingFace model directory and refuses unsupported models.

See `ModelFacts` in facts.py for the value that commands read once and pass on.
"""

import json
from math import lcm
from pathlib import Path
from typing import Any

from mcore_rl.slices.families import family_of, refuse_unsupported
from mcore_rl.slices.families.table import HfConfig
from mcore_rl.slices.hf.nested import with_text_settings

VOCAB_MULTIPLE = 128
"""The embedding is padded to a multiple of so many rows."""


def read_hf_config(hf_dir: str | Path) -> dict[str, Any]:
    """Return the parsed config.json of a supported model, with its text_config at the top.

    Raises ValueError naming the file and the setting if the model is not supported.
    """
    config = with_text_settings(parse_hf_config(hf_dir))
    refuse_unsupported(config, Path(hf_dir) / "config.json")
    return config


def parse_hf_config(hf_dir: str | Path) -> dict[str, Any]:
    """Return the parsed config.json of any model, supported or not.

    Raises ValueError naming the file if it is missing or is not a JSON object.
    """
    path = Path(hf_dir) / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: {hf_dir} is not a HuggingFace model directory")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a JSON object: it is damaged")
    return config


def named_dtype(config: HfConfig) -> str | None:
    """Return the torch name of the model's dtype, None if config.json gives none.

    The key is `dtype`, in older files `torch_dtype`.
    """
    return config.get("dtype") or config.get("torch_dtype")


def padded_vocab_size(config: HfConfig, tp: int) -> int:
    """Return the rows of the embedding in memory, padding included.

    The number is the same for every `tp` that divides VOCAB_MULTIPLE, so that checkpoints reshard.
    """
    multiple = lcm(VOCAB_MULTIPLE, tp)
    return -(-config["vocab_size"] // multiple) * multiple


def moe_layers(config: HfConfig) -> list[int]:
    """Return 1 for each layer with experts and 0 for each dense layer, in order."""
    family = family_of(config)
    return [int(family.is_moe_layer(config, i)) for i in range(config["num_hidden_layers"])]
