"""Compares a checkpoint with the adapter that a run trains, before anything of it is loaded."""

from math import prod
from pathlib import Path

from mcore_rl.weights.lora.facts import FACTORS, AdapterFacts, refuse_other_adapter
from mcore_rl.weights.lora.whole import check_whole
from mcore_rl.weights.megatron_files.metadata import read_metadata_of, read_shape
from mcore_rl.weights.models.table import HfConfig, Shape


def check_saved_adapter(
    folder: Path, here: Path, own: AdapterFacts | None, hf_config: HfConfig
) -> None:
    """Raise ValueError unless a checkpoint holds exactly what this run trains.

    here   local copy of `folder` that is read; messages name `folder`
    own    the run's adapter; None: the run trains all weights
    """
    refuse_other_adapter(folder, own, here)
    if own is not None:
        check_whole(_read_factor_shapes(folder, here), own.list_factor_shapes(hf_config), folder)


def _read_factor_shapes(folder: Path, here: Path) -> dict[str, Shape]:
    """Return the stored factors' shapes by "<HF tensor>.A" and "<HF tensor>.B"."""
    shapes: dict[str, Shape] = {}
    for key, entry in read_metadata_of(here).get("state_dict_metadata").items():
        if not key.startswith(FACTORS):
            continue
        shapes[key.removeprefix(FACTORS)] = shape = read_shape(entry.get("size"))
        stored = sum(prod(read_shape(chunk.get("sizes"))) for chunk in entry.get("chunks"))
        if stored != prod(shape):
            raise ValueError(
                f"{folder}: {stored} numbers are stored of {key!r}, whose shape {shape} has"
                f" {prod(shape)}: parts of it were dropped, or written by several ranks"
            )
    return shapes
