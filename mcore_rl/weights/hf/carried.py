"""Finds the carried tensors of a checkpoint by name and copies them unchanged into exports.

A carried tensor, such as one of a multi-token-prediction layer, is neither trained nor synced. Peak
memory: one file of `max_file_bytes`, or one tensor if that is larger.
"""

from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from mcore_rl.weights.hf.files import CarriedFile, save_tensors
from mcore_rl.weights.hf.folder import TEMPORARY, checkpoint_files
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.table import HfConfig


def carried_tensors(hf_dir: Path, config: HfConfig) -> dict[str, Path]:
    """Return HF name -> file of each carried tensor; empty if the directory has no weights."""
    family = family_of(config)
    file_of: dict[str, Path] = {}
    if not any(hf_dir.glob("*.safetensors")):
        return file_of
    for path in checkpoint_files(hf_dir):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
                if family.is_carried(config, name):
                    file_of[name] = path
    return file_of


def write_carried(
    hf_dir: Path, out_dir: Path, config: HfConfig, max_file_bytes: int = 4 << 30
) -> list[CarriedFile]:
    """Copy the carried tensors of `hf_dir` to files in `out_dir` and return what was written.

    The files have temporary names until `commit_export` renames them.
    """
    written = []
    batches = _batches(carried_tensors(hf_dir, config), max_file_bytes)
    for number, batch in enumerate(batches, start=1):
        filename = f"carried-{number:05d}.safetensors"
        save_tensors(batch, out_dir / (filename + TEMPORARY))
        written.append(CarriedFile(filename, tuple(batch), _num_bytes(batch)))
    return written


def _batches(file_of: dict[str, Path], max_file_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors by name, in batches of at most `max_file_bytes` or of one tensor."""
    batch: dict[str, Tensor] = {}
    for name, path in file_of.items():
        with safe_open(path, framework="pt") as file:
            tensor = file.get_tensor(name)
        if batch and _num_bytes(batch) + tensor.nbytes > max_file_bytes:
            yield batch
            batch = {}
        batch[name] = tensor
    if batch:
        yield batch


def _num_bytes(batch: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in batch.values())
