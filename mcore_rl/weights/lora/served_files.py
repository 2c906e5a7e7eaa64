"""Reads adapters in PEFT's format for engines that serve them."""

from pathlib import Path
from typing import Any

from torch import Tensor

from mcore_rl.weights.lora.facts import describe_base_difference
from mcore_rl.weights.lora.peft_files import PeftAdapter, read_peft
from mcore_rl.weights.lora.places import FIRST, list_factor_shapes
from mcore_rl.weights.lora.served import (
    make_engine_config,
    make_engine_factors,
    refuse_unserved_matrices,
)
from mcore_rl.weights.lora.targets import list_matrices
from mcore_rl.weights.lora.whole import check_factor_shapes
from mcore_rl.weights.models import hf_tensor_shapes
from mcore_rl.weights.models.table import HfConfig


def check_served(folder: Path, base: str, hf_config: HfConfig, model_path: Path) -> PeftAdapter:
    """Return an adapter in PEFT's format that an engine can serve beside a model's weights.

    base   checksum of these weights
    Raises ValueError naming what is missing, is of no matrix of the model, or is not served, or if
    the adapter says that it belongs to other weights.
    """
    adapter = read_peft(folder)
    shapes = hf_tensor_shapes(hf_config)
    names = {key[: -len(FIRST)] for key in adapter.shapes}
    known = {name: shapes[name] for name in list_matrices(hf_config) if name in names}
    check_factor_shapes(adapter.shapes, list_factor_shapes(known, adapter.rank), folder)
    refuse_unserved_matrices(hf_config, known, str(folder), "merge it (mcore-rl-ckpt merge-lora)")
    if adapter.base and adapter.base != base:
        where = str(folder)
        raise ValueError(describe_base_difference(where, adapter.base, base, str(model_path)))
    return adapter


def read_engine_adapter(
    folder: Path, hf_config: HfConfig
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the configuration and the factors, as SGLang takes them, of a checked adapter."""
    adapter = read_peft(folder)
    with adapter.open() as file:
        factors = {key: file.read(key) for key in adapter.shapes}
    names = {key[: -len(FIRST)] for key in factors}
    config = make_engine_config(names, adapter.rank, adapter.scale)
    return config, make_engine_factors(factors, hf_tensor_shapes(hf_config))
