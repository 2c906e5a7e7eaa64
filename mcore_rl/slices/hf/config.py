"""A HuggingFace model directory in, its config.json out; what is not supported is refused here, once."""

import json
from math import lcm
from pathlib import Path
from typing import Any

from mcore_rl.slices.families import family_of, refuse_unsupported
from mcore_rl.slices.families.table import HfConfig

VOCAB_MULTIPLE = 128


def read_hf_config(hf_dir: str | Path) -> dict[str, Any]:
    """The parsed config.json of a supported model; ValueError names the file and what is wrong with it."""
    config = parse_hf_config(hf_dir)
    refuse_unsupported(config, Path(hf_dir) / "config.json")
    return config


def parse_hf_config(hf_dir: str | Path) -> dict[str, Any]:
    """The parsed config.json of any model; ValueError names the file if there is none or it is damaged."""
    path = Path(hf_dir) / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: {hf_dir} is not a HuggingFace model directory")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:  # no JSON, or no UTF-8
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is no JSON object: it is damaged")
    return config


def named_dtype(config: HfConfig) -> str | None:
    """The dtype of the model by its config.json, in the newer or the older spelling of the key."""
    return config.get("dtype") or config.get("torch_dtype")


def padded_vocab_size(config: HfConfig, tp: int) -> int:
    """Rows of the embedding in memory, the same for every usual `tp` so that checkpoints reshard."""
    multiple = lcm(VOCAB_MULTIPLE, tp)
    return -(-config["vocab_size"] // multiple) * multiple


def moe_layers(config: HfConfig) -> list[int]:
    """1 for each layer with experts, 0 for each dense one."""
    family = family_of(config)
    return [int(family.is_moe_layer(config, i)) for i in range(config["num_hidden_layers"])]
