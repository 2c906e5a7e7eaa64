"""HuggingFace safetensors directories: their slices into local tensors, and exported tensors into new files.

Peak memory: one slice while loading; on export one file's tensors (`max_file_bytes`) per rank.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mcore_rl.slices.box import Box, Shard, itemsize
from mcore_rl.slices.families.settings import DEQUANTISE
from mcore_rl.slices.families.table import HfConfig, Shape
from mcore_rl.slices.hf.checksums import (
    MANIFEST,
    FileSums,
    sum_safetensors,
    sum_small_files,
    write_manifest,
)
from mcore_rl.slices.hf.facts import ModelFacts
from mcore_rl.slices.hf.folder import (
    INDEX,
    TEMPORARY,
    checkpoint_files,
    deal_out,
    write_small_files,
)
from mcore_rl.slices.hf.fp8 import scaled_name
from mcore_rl.slices.plan.coverage import contiguous_strides

PLAIN_DTYPES = ("BF16", "F16", "F32", "F64")
"""safetensors' names of the dtypes that a model is loaded from."""


def open_hf_dir(model: ModelFacts) -> dict[str, Path]:
    """HF tensor name -> file that holds it, after comparing all names and shapes with config.json.

    ValueError names the file, the tensor and the remedy for a missing, surplus or misshapen tensor.
    """
    config, family = model.config, model.family
    expected = family.shapes(config)
    files = checkpoint_files(model.path)
    where: dict[str, Path] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
                if name in family.left_out(config) or family.is_carried(config, name):
                    continue
                stored = file.get_slice(name)
                _check_dtype(path, name, stored.get_dtype())
                _check_tensor(path, name, tuple(stored.get_shape()), expected, where)
                where[name] = path
    missing = sorted(expected.keys() - where.keys())
    if missing:
        raise ValueError(
            f"{model.path} lacks {len(missing)} of {len(expected)} tensors, the first is {missing[0]!r}: "
            f"download the checkpoint again, or correct config.json (files read: {[p.name for p in files]})"
        )
    return where


def _check_dtype(path: Path, name: str, dtype: str) -> None:
    """Values without their scales would be cast in silence to weights that mean something else."""
    if dtype not in PLAIN_DTYPES or scaled_name(name):
        what = f"is {dtype}" if dtype not in PLAIN_DTYPES else "holds scales of 8-bit values"
        raise ValueError(f"{path}: tensor {name!r} {what}, so the model is quantised: {DEQUANTISE}")


def _check_tensor(
    path: Path, name: str, shape: Shape, expected: Mapping[str, Shape], where: Mapping[str, Path]
) -> None:
    if name not in expected:
        raise ValueError(
            f"{path}: tensor {name!r} has no place in the model that config.json describes: "
            "remove it, or correct config.json"
        )
    if name in where:
        raise ValueError(
            f"{path}: tensor {name!r} is also in {where[name].name}: remove one of the two"
        )
    if shape != expected[name]:
        raise ValueError(
            f"{path}: tensor {name!r} has shape {shape}, by config.json it should be {expected[name]}: "
            "config.json belongs to another model, or the file does"
        )


@torch.no_grad()
def load_into(shards: Sequence[Shard], tensors: Mapping[str, Tensor], model: ModelFacts) -> None:
    """Fill the shards of local `tensors` from a model directory, reading only their slices; cast as needed.

    The directory is checked first, see `open_hf_dir`; a shard that names no tensor of it is a ValueError.
    """
    where = open_hf_dir(model)
    by_file: dict[Path, list[Shard]] = defaultdict(list)
    for shard in shards:
        if shard.box.name not in where:
            raise ValueError(
                f"{model.path} has no tensor {shard.box.name!r}, which {shard.tensor!r} is loaded from"
            )
        by_file[where[shard.box.name]].append(shard)
    for path, members in sorted(by_file.items()):
        with safe_open(path, framework="pt") as file:
            for shard in members:
                index = tuple(
                    slice(a, b) for a, b in zip(shard.box.start, shard.box.stop, strict=True)
                )
                shard.view(tensors).copy_(file.get_slice(shard.box.name)[index])


@dataclass(frozen=True)
class CarriedFile:
    """A file of tensors that the export takes over unchanged, written under a temporary name."""

    filename: str
    names: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True)
class ExportFile:
    """One safetensors file to be: rank `rank` writes the whole HF tensors of `shards` to `filename`."""

    filename: str
    rank: int
    shards: tuple[Shard, ...]


def plan_export(
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, str],
    num_ranks: int,
    max_file_bytes: int = 4 << 30,
) -> tuple[ExportFile, ...]:
    """Deal whole HF tensors out to files of about `max_file_bytes`, and files to ranks in turn.

    Files differ by at most one tensor's bytes, so ranks do as well; every rank has one if there are enough
    tensors. Files [k * num_ranks, (k + 1) * num_ranks) are a round that can be filled, written and freed
    before the next. Each shard is a local tensor of its HF name.
    """
    sizes = {name: prod(shape) * itemsize(dtypes[name]) for name, shape in shapes.items()}
    num_files = max(-(-sum(sizes.values()) // max_file_bytes), min(num_ranks, len(sizes)))
    num_files = -(-num_files // num_ranks) * num_ranks if num_files > num_ranks else num_files
    return tuple(
        ExportFile(
            f"model-{number + 1:05d}-of-{num_files:05d}.safetensors",
            number % num_ranks,
            tuple(whole_tensor(name, shapes[name], dtypes[name]) for name in sorted(names)),
        )
        for number, names in enumerate(deal_out(sizes, num_files))
    )


def whole_tensor(name: str, shape: Shape, dtype: str) -> Shard:
    """A whole HF tensor as a contiguous local tensor of the same name."""
    return Shard(Box(name, (0,) * len(shape), shape), name, 0, contiguous_strides(shape), dtype)


def export_targets(files: Sequence[ExportFile], num_ranks: int) -> list[list[Shard]]:
    """Per rank the shards of its files: the targets of the plan that fills them."""
    return [
        [shard for file in files if file.rank == rank for shard in file.shards]
        for rank in range(num_ranks)
    ]


def empty_tensors(shards: Sequence[Shard]) -> dict[str, Tensor]:
    """Uninitialised contiguous tensors for shards that are whole tensors, by name."""
    return {
        shard.tensor: torch.empty(shard.box.shape, dtype=getattr(torch, shard.dtype))
        for shard in shards
    }


def write_export_file(out_dir: Path, file: ExportFile, tensors: Mapping[str, Tensor]) -> FileSums:
    """Write one file under a temporary name, its checksums out; `commit_export` gives it its own."""
    out_dir.mkdir(parents=True, exist_ok=True)
    chosen = {shard.tensor: tensors[shard.tensor] for shard in file.shards}
    path = out_dir / (file.filename + TEMPORARY)
    save_file(chosen, path, metadata={"format": "pt"})
    return sum_safetensors(path)


def commit_export(
    out_dir: Path,
    files: Sequence[ExportFile],
    hf_config: HfConfig,
    dtype: str,
    side_files_from: Path | None = None,
    carried: Sequence[CarriedFile] = (),
    sums: Mapping[str, FileSums] | None = None,
) -> None:
    """Make the written files a model directory; call once, after all ranks have written theirs.

    The index comes last, so a directory with an index is complete. Tokenizer and other small files are
    copied from `side_files_from`; `carried` files hold tensors beside the model; config.json is `hf_config`
    with `dtype`, the model's; checksums.json has the `sums` that were taken while writing, and those
    of all other files. ValueError names a file that no rank wrote.
    """
    for file in files:
        written = out_dir / (file.filename + TEMPORARY)
        if not written.is_file():
            raise ValueError(
                f"{written} does not exist: rank {file.rank} has not written its part of the export"
            )
    (out_dir / INDEX).unlink(missing_ok=True)
    for stale in (*out_dir.glob("*.safetensors"), out_dir / MANIFEST):
        stale.unlink(missing_ok=True)
    for filename in [file.filename for file in (*files, *carried)]:
        (out_dir / (filename + TEMPORARY)).rename(out_dir / filename)
    total = sum(shard.num_bytes for file in files for shard in file.shards)
    total += sum(file.num_bytes for file in carried)
    weight_map = {shard.box.name: file.filename for file in files for shard in file.shards}
    weight_map |= {name: file.filename for file in carried for name in file.names}
    write_small_files(out_dir, {**hf_config, "dtype": dtype}, weight_map, total, side_files_from)
    names = [file.filename for file in (*files, *carried)]
    every = {name: (sums or {}).get(name) or sum_safetensors(out_dir / name) for name in names}
    write_manifest(out_dir, every | sum_small_files(out_dir, every))
