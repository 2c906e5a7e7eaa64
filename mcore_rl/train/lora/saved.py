"""Compares a checkpoint with the adapters that a run trains, before anything of it is loaded."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from mcore_rl.weights.lora.facts import (
    FACTORS,
    OF_CRITIC,
    OF_POLICY,
    AdapterFacts,
    refuse_other_adapters,
)
from mcore_rl.weights.lora.whole import check_factor_shapes
from mcore_rl.weights.megatron_files.metadata import read_metadata_of, read_shape
from mcore_rl.weights.models.table import HfConfig, Shape
from mcore_rl.weights.models.value_head import VALUE_HEAD, find_value_head


def check_saved_adapters(
    folder: Path, here: Path, own: Mapping[str, AdapterFacts], hf_config: HfConfig
) -> None:
    """Raise ValueError unless a checkpoint holds exactly what this run trains.

    here   local copy of `folder` that is read; messages name `folder`
    own    the run's adapters by name, "" being the name of an only one; {}: all weights are trained
    """
    head = find_value_head(hf_config)
    refuse_other_adapters(folder, own, here, OF_POLICY if head is None else OF_CRITIC)
    if not own:
        return
    stored = read_metadata_of(here).get("state_dict_metadata")
    wanted = {
        f"{name}.{key}" if name else key: shape
        for name, facts in own.items()
        for key, shape in facts.list_factor_shapes(hf_config).items()
    }
    check_factor_shapes(_read_factor_shapes(folder, stored), wanted, folder)
    has_head = VALUE_HEAD in stored
    if has_head != (head is not None):
        saved, wanted = ("a critic", "a policy") if has_head else ("a policy", "a critic")
        raise ValueError(
            f"{folder} holds the factors of {saved}, and this run's are of {wanted}: a policy's"
            " folders are named step_..., a critic's critic_..."
        )


def _read_factor_shapes(folder: Path, stored: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the factors' shapes by "<HF tensor>.A" and "<HF tensor>.B".

    stored   metadata of all tensors of the checkpoint, by key
    """
    shapes: dict[str, Shape] = {}
    for key, entry in stored.items():
        if not key.startswith(FACTORS):
            continue
        shapes[key.removeprefix(FACTORS)] = shape = read_shape(entry.get("size"))
        num_stored = sum(prod(read_shape(chunk.get("sizes"))) for chunk in entry.get("chunks"))
        if num_stored != prod(shape):
            raise ValueError(
                f"{folder}: {num_stored} numbers are stored of {key!r}, whose shape {shape} has"
                f" {prod(shape)}: parts of it were dropped, or written by several ranks"
            )
    return shapes
