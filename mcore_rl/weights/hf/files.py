"""Loads slices of a HuggingFace directory into local tensors, and exports tensors to a new one.

    load    *.safetensors --slice of each shard's box--> local tensors of one rank
    export  plan_export -> every rank: write_export_file (*.part) -> one rank: commit_export

Peak memory: one slice while loading; the tensors of one file (`max_file_bytes`) per rank on export,
or one tensor if that is larger. Carried tensors, such as those of a multi-token-prediction layer,
are neither trained nor synced: an export gets them unchanged.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mcore_rl.process.disk import force
from mcore_rl.weights.box import Box, Shard, contiguous_strides, itemsize
from mcore_rl.weights.hf.checksums import (
    MANIFEST,
    FileSums,
    sum_safetensors,
    sum_small_files,
    write_manifest,
)
from mcore_rl.weights.hf.config import ModelFacts, set_dtype
from mcore_rl.weights.hf.folder import (
    INDEX,
    TEMPORARY,
    deal_out,
    list_checkpoint_files,
    write_small_files,
)
from mcore_rl.weights.hf.fp8 import find_scaled_name
from mcore_rl.weights.hf.int4 import (
    PACKED,
    SCALE,
    SHAPE,
)
from mcore_rl.weights.hf.opened import list_packed, open_hf_dir
from mcore_rl.weights.hf.packed_part import read_part
from mcore_rl.weights.hf.packing import Packing, list_stored_names
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.table import HfConfig, Shape


def count_not_finite(values: Tensor) -> int:
    """Return how many numbers are not finite; with none, the tensor is read once."""
    if not values.is_floating_point() or values.numel() == 0:
        return 0
    if bool(values.sum(dtype=torch.float32).isfinite()):  # a number that is not stays in the sum
        return 0
    return values.numel() - int(values.isfinite().sum())


@torch.no_grad()
def load_into(shards: Sequence[Shard], tensors: Mapping[str, Tensor], model: ModelFacts) -> None:
    """Fill the shards of the local `tensors` from a model directory, casting as needed.

    Only the slices of the shards are read. Raises ValueError as `open_hf_dir` does, and for a shard
    of an HF tensor that the directory lacks, or that has NaN in it.
    """
    file_of = open_hf_dir(model)
    by_file: dict[Path, list[Shard]] = defaultdict(list)
    for shard in shards:
        name = shard.box.name
        if name not in file_of:
            raise ValueError(f"{model.path} has no tensor {name!r}, which fills {shard.tensor!r}")
        by_file[file_of[name]].append(shard)
    packed = list_packed(model.packing, file_of)
    for path, members in sorted(by_file.items()):
        with safe_open(path, framework="pt") as file:
            for shard in members:
                box = shard.box
                if box.name in packed:
                    read = _read_packed(model.packing, box, file_of)
                else:
                    read = file.get_slice(box.name)[tuple(map(slice, box.start, box.stop))]
                if num_bad := count_not_finite(read):
                    raise ValueError(
                        f"{path}: tensor {box.name!r} has {num_bad} of {read.numel()} values that"
                        f" are not finite (at {box.start} to {box.stop}): give another model.path"
                    )
                shard.view(tensors).copy_(read)


def _read_packed(packing: Packing, box: Box, file_of: Mapping[str, Path]) -> Tensor:
    """Return the elements of a part of a packed matrix."""
    with ExitStack() as stack:
        values, scales = (
            stack.enter_context(safe_open(file_of[name], framework="pt")).get_slice(name)
            for name in list_stored_names(packing, box.name)
        )
        return read_part(packing, values, scales, box).dequantize()


@dataclass(frozen=True)
class CarriedFile:
    """A file of tensors that an export copies unchanged, still under its temporary name."""

    filename: str
    names: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True)
class ExportFile:
    """A safetensors file to write: rank `rank` writes the whole HF tensors of `shards` to it."""

    filename: str
    rank: int
    shards: tuple[Shard, ...]


def plan_export(
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, str],
    num_ranks: int,
    max_file_bytes: int = 4 << 30,
) -> tuple[ExportFile, ...]:
    """Deal whole HF tensors out to files of about `max_file_bytes`, and the files to ranks in turn.

    Files differ by at most the bytes of one tensor, and so do ranks. Every rank has a file if there
    are enough tensors. Files [k * num_ranks, (k + 1) * num_ranks) are a round that is filled,
    written and freed before the next. The local tensor of each shard has the HF tensor's name.
    """
    sizes = {name: prod(shape) * itemsize(dtypes[name]) for name, shape in shapes.items()}
    num_files = max(-(-sum(sizes.values()) // max_file_bytes), min(num_ranks, len(sizes)))
    if num_files > num_ranks:
        num_files = -(-num_files // num_ranks) * num_ranks
    files = []
    for number, names in enumerate(deal_out(sizes, num_files)):
        filename = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        shards = tuple(
            cover_whole_tensor(name, shapes[name], dtypes[name]) for name in sorted(names)
        )
        files.append(ExportFile(filename, number % num_ranks, shards))
    return tuple(files)


def cover_whole_tensor(name: str, shape: Shape, dtype: str) -> Shard:
    """Return the shard of a whole HF tensor in a contiguous local tensor of the same name."""
    return Shard(Box(name, (0,) * len(shape), shape), name, 0, contiguous_strides(shape), dtype)


def list_export_targets(files: Sequence[ExportFile], num_ranks: int) -> list[list[Shard]]:
    """Return the shards of each rank's files: the targets of the plan that fills the files."""
    return [
        [shard for file in files if file.rank == rank for shard in file.shards]
        for rank in range(num_ranks)
    ]


def make_empty_tensors(shards: Sequence[Shard]) -> dict[str, Tensor]:
    """Return uninitialized contiguous tensors by name, for shards that are whole tensors."""
    return {
        shard.tensor: torch.empty(shard.box.shape, dtype=getattr(torch, shard.dtype))
        for shard in shards
    }


def write_export_file(out_dir: Path, file: ExportFile, tensors: Mapping[str, Tensor]) -> FileSums:
    """Write one file and return its checksums; `commit_export` gives it its final name."""
    out_dir.mkdir(parents=True, exist_ok=True)
    chosen = {shard.tensor: tensors[shard.tensor] for shard in file.shards}
    path = out_dir / (file.filename + TEMPORARY)
    save_tensors(chosen, path)
    return sum_safetensors(path)


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Write a safetensors file with the permissions that umask gives; save_file sets 0600."""
    path.unlink(missing_ok=True)
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata={"format": "pt", **metadata})
    path.chmod(mode)


def commit_export(
    out_dir: Path,
    files: Sequence[ExportFile],
    hf_config: HfConfig,
    dtype: str,
    side_files_from: Path | None = None,
    carried: Sequence[CarriedFile] = (),
    sums: Mapping[str, FileSums] | None = None,
) -> None:
    """Turn the written files into a model directory; call once, after all ranks have written.

    The index is written last, so a directory with an index is complete. Raises ValueError naming a
    file that no rank wrote.

    hf_config         config.json of the model; the export says `dtype` in it
    dtype             torch name of the model's dtype
    side_files_from   directory whose tokenizer and other small files are copied
    carried           files of tensors that are not part of the model that was trained
    sums              checksums by filename, as far as they were computed while writing
    """
    for file in files:
        written = out_dir / (file.filename + TEMPORARY)
        if not written.is_file():
            raise ValueError(
                f"{written} does not exist: rank {file.rank} has not written its part of the export"
            )
    # Carried files first: a directory that lacks them alone would be taken for whole.
    filenames = [file.filename for file in (*carried, *files)]
    for filename in filenames:
        force(out_dir / (filename + TEMPORARY))
    (out_dir / INDEX).unlink(missing_ok=True)
    for stale in (*out_dir.glob("*.safetensors"), out_dir / MANIFEST):
        stale.unlink(missing_ok=True)
    for filename in filenames:
        (out_dir / (filename + TEMPORARY)).rename(out_dir / filename)
    total_bytes = sum(shard.num_bytes for file in files for shard in file.shards)
    total_bytes += sum(file.num_bytes for file in carried)
    weight_map = {shard.box.name: file.filename for file in files for shard in file.shards}
    weight_map |= {name: file.filename for file in carried for name in file.names}
    config = set_dtype(hf_config, dtype)
    write_small_files(out_dir, config, weight_map, total_bytes, side_files_from)
    known = sums or {}
    weight_sums = {name: known.get(name) or sum_safetensors(out_dir / name) for name in filenames}
    write_manifest(out_dir, weight_sums | sum_small_files(out_dir, weight_sums))
    force(out_dir)


def list_carried_tensors(hf_dir: Path, config: HfConfig) -> dict[str, Path]:
    """Return HF name -> file of each carried tensor; empty if the directory has no weights.

    Parts of INT4 matrices are left out, as exports have plain weights alone, and so are scales of
    FP8, which `write_carried` multiplies into their matrices.
    """
    return {
        name: path
        for name, path in _find_carried(hf_dir, config).items()
        if not name.endswith((PACKED, SCALE, SHAPE)) and find_scaled_name(name) is None
    }


def _find_carried(hf_dir: Path, config: HfConfig) -> dict[str, Path]:
    """Return HF name -> file of each carried tensor, parts of packed matrices included."""
    family = family_of(config)
    file_of: dict[str, Path] = {}
    if not any(hf_dir.glob("*.safetensors")):
        return file_of
    for path in list_checkpoint_files(hf_dir):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
                if family.is_carried(config, name):
                    file_of[name] = path
    return file_of


def write_carried(
    hf_dir: Path,
    out_dir: Path,
    config: HfConfig,
    max_file_bytes: int = 4 << 30,
    but: Collection[str] = (),
) -> list[CarriedFile]:
    """Copy the carried tensors of `hf_dir` to files in `out_dir` and return what was written.

    The files have temporary names until `commit_export` renames them. FP8 matrices become bfloat16.

    but   HF names of tensors that other files have
    """
    written = []
    found = _find_carried(hf_dir, config)
    left = [name for name in list_carried_tensors(hf_dir, config) if name not in but]
    batches = _batch_tensors(left, found, max_file_bytes)
    for number, batch in enumerate(batches, start=1):
        filename = f"carried-{number:05d}.safetensors"
        save_tensors(batch, out_dir / (filename + TEMPORARY))
        written.append(CarriedFile(filename, tuple(batch), _count_bytes(batch)))
    return written


def _batch_tensors(
    names: Sequence[str], file_of: Mapping[str, Path], max_file_bytes: int
) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors by name, in batches of at most `max_file_bytes` or of one tensor."""
    batch: dict[str, Tensor] = {}
    in_fp8 = list_packed("fp8", file_of)
    for name in names:
        with safe_open(file_of[name], framework="pt") as file:
            if name in in_fp8:
                shape = tuple(file.get_slice(name).get_shape())
                tensor = _read_packed("fp8", Box(name, (0,) * len(shape), shape), file_of)
            else:
                tensor = file.get_tensor(name)
        if batch and _count_bytes(batch) + tensor.nbytes > max_file_bytes:
            yield batch
            batch = {}
        batch[name] = tensor
    if batch:
        yield batch


def _count_bytes(batch: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in batch.values())
