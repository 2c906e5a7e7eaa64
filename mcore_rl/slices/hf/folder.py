"""The files of a HuggingFace directory: tensors, index, configuration and tokenizer."""

import heapq
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_rl.slices.families.table import HfConfig
from mcore_rl.slices.hf.checksums import MANIFEST
from mcore_rl.slices.hf.nested import without_text_settings

INDEX = "model.safetensors.index.json"
TEMPORARY = ".part"
"""Suffix of a file that is not complete yet."""


def checkpoint_files(hf_dir: Path) -> list[Path]:
    """Return the safetensors files of a model directory, in order of their names.

    Raises ValueError if there are none, or naming one that the index lists and that is missing.
    """
    index = hf_dir / INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = sorted(path.name for path in hf_dir.glob("*.safetensors"))
    if not names:
        raise ValueError(f"{hf_dir} has no .safetensors files: save the model in that format")
    for name in names:
        if not (hf_dir / name).is_file():
            raise ValueError(
                f"{hf_dir / name}, named in {INDEX}, does not exist: download it again"
            )
    return [hf_dir / name for name in names]


def deal_out(sizes: Mapping[str, int], num_files: int) -> list[list[str]]:
    """Return the names of each file's tensors; files differ by at most the bytes of one tensor.

    sizes   name -> bytes
    """
    bins: list[list[str]] = [[] for _ in range(num_files)]
    loads = [(0, number) for number in range(num_files)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        num_bytes, lightest = heapq.heappop(loads)
        bins[lightest].append(name)
        heapq.heappush(loads, (num_bytes + sizes[name], lightest))
    return bins


def write_small_files(
    out_dir: Path,
    config: HfConfig,
    weight_map: Mapping[str, str],
    total_bytes: int,
    side_files_from: Path | None = None,
) -> None:
    """Copy tokenizer files from `side_files_from`, write config.json, and write the index last."""
    if side_files_from is not None:
        _copy_side_files(side_files_from, out_dir)
    _write_json(out_dir / "config.json", without_text_settings(config))
    write_index(out_dir, weight_map, total_bytes)


def write_index(out_dir: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    """Write the index: `weight_map` is HF name -> file, `total_bytes` those of all tensors."""
    _write_json(
        out_dir / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    )


def _copy_side_files(source: Path, out_dir: Path) -> None:
    for path in sorted(source.iterdir()):
        is_weights = ".safetensors" in path.name or path.suffix in {".bin", ".pt", ".pth"}
        is_side_file = path.is_file() and not is_weights and path.name != MANIFEST
        if is_side_file and path.parent.resolve() != out_dir.resolve():
            shutil.copy(path, out_dir / path.name)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    temporary = path.with_name(path.name + TEMPORARY)
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    temporary.rename(path)
