"""Tensors of a checkpoint that are neither trained nor synced, found by name; unchanged they go into exports.

Such are the layers for multi-token prediction. Peak memory: one file of `max_file_bytes`, or one tensor.
"""

from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mcore_rl.slices.families import family_of
from mcore_rl.slices.families.table import HfConfig
from mcore_rl.slices.hf.files import CarriedFile
from mcore_rl.slices.hf.folder import TEMPORARY, checkpoint_files


def carried_tensors(hf_dir: Path, config: HfConfig) -> dict[str, Path]:
    """HF name -> file of each tensor that the directory, if it has weights at all, holds beside the model."""
    family = family_of(config)
    found: dict[str, Path] = {}
    if not any(hf_dir.glob("*.safetensors")):
        return found
    for path in checkpoint_files(hf_dir):
        with safe_open(path, framework="pt") as file:
            found |= {name: path for name in file.keys() if family.is_carried(config, name)}  # noqa: SIM118
    return found


def write_carried(
    hf_dir: Path, out_dir: Path, config: HfConfig, max_file_bytes: int = 4 << 30
) -> list[CarriedFile]:
    """Copy the carried tensors of `hf_dir` to `out_dir`; `commit_export` gives the files their names."""
    written = []
    for number, batch in enumerate(
        _batches(carried_tensors(hf_dir, config), max_file_bytes), start=1
    ):
        filename = f"carried-{number:05d}.safetensors"
        save_file(batch, out_dir / (filename + TEMPORARY), metadata={"format": "pt"})
        written.append(CarriedFile(filename, tuple(batch), sum(t.nbytes for t in batch.values())))
    return written


def _batches(where: dict[str, Path], max_file_bytes: int) -> Iterator[dict[str, Tensor]]:
    batch: dict[str, Tensor] = {}
    for name, path in where.items():
        with safe_open(path, framework="pt") as file:
            tensor = file.get_tensor(name)
        if batch and sum(t.nbytes for t in batch.values()) + tensor.nbytes > max_file_bytes:
            yield batch
            batch = {}
        batch[name] = tensor
    if batch:
        yield batch
