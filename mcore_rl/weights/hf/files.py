"""Loads slices of a HuggingFace directory into local tensors, and exports tensors to a new one.

    load    *.safetensors --slice of each shard's box--> local tensors of one rank
    export  plan_export -> every rank: write_export_file (*.part) -> one rank: commit_export

Peak memory: one slice while loading; the tensors of one file (`max_file_bytes`) per rank on export,
or one tensor if that is larger. Carried tensors, such as those of a multi-token-prediction layer,
are neither trained nor synced: an export gets them unchanged.

A model whose config.json ties the output layer to the embeddings, but whose files don't, is
refused: transformers (5.19, PreTrainedModel.tie_weights) compares the two if both are stored. It
ties them if they are equal, otherwise it warns and uses the stored output layer, against
config.json.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mcore_rl.process.disk import check_readable, force
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
    check_header,
    deal_out,
    list_checkpoint_files,
    write_small_files,
)
from mcore_rl.weights.hf.fp8 import find_scaled_name
from mcore_rl.weights.hf.int4 import (
    GROUP,
    PACKED,
    PER_WORD,
    SCALE,
    SHAPE,
    list_part_names,
    split_part,
)
from mcore_rl.weights.hf.int4_groups import read_slice
from mcore_rl.weights.hf.tied_head import refuse_untied_head
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.settings import DEQUANTIZE_REMEDY
from mcore_rl.weights.models.table import HfConfig, Shape


def count_not_finite(values: Tensor) -> int:
    """Return how many numbers are not finite; with none, the tensor is read once."""
    if not values.is_floating_point() or values.numel() == 0:
        return 0
    if bool(values.sum(dtype=torch.float32).isfinite()):  # a number that is not stays in the sum
        return 0
    return values.numel() - int(values.isfinite().sum())


PLAIN_DTYPES = ("BF16", "F16", "F32", "F64")
"""The dtypes that weights can be loaded from, by their safetensors names."""


def open_hf_dir(model: ModelFacts) -> dict[str, Path]:
    """Return HF name -> file of every tensor, after checking all names and shapes.

    The parts of an INT4 matrix are listed, too, and the matrix itself in the file of its words.
    Raises ValueError naming the file, the tensor and the remedy for a tensor that config.json does
    not expect, that is missing, or that has another shape.
    """
    config = model.config
    family = model.family
    expected = family.shapes(config)
    files = list_checkpoint_files(model.path)
    file_of: dict[str, Path] = {}
    tied: dict[str, Path] = {}
    for path in files:
        check_readable(path)  # safetensors says that such a file does not exist
        check_header(path)
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
                if name in family.find_left_out(config):
                    tied[name] = path
                    continue
                if family.is_carried(config, name):
                    continue
                if model.int4 and split_part(name):
                    _note_part(path, name, file.get_slice(name), expected, file_of)
                    continue
                stored = file.get_slice(name)
                _check_dtype(path, name, stored.get_dtype())
                _check_tensor(path, name, tuple(stored.get_shape()), expected, file_of)
                file_of[name] = path
    refuse_untied_head(file_of | tied, config)
    missing = sorted((expected.keys() | _list_parts(file_of)) - file_of.keys())
    if missing:
        raise ValueError(
            f"{model.path} lacks {len(missing)} of {len(expected)} tensors, the first is"
            f" {missing[0]!r}: download the checkpoint again, or correct config.json"
            f" (files read: {[path.name for path in files]})"
        )
    return file_of


def _note_part(
    path: Path, name: str, stored: Any, expected: Mapping[str, Shape], file_of: dict[str, Path]
) -> None:
    """Enter a part of an INT4 matrix under its own name, and the words under the matrix' as well.

    Raises ValueError naming file and tensor for another dtype or shape than the matrix needs.
    """
    part = split_part(name)
    assert part is not None, name
    matrix, suffix = part
    rows, columns = expected.get(matrix, (0, 0))
    shapes = {
        PACKED: (rows, columns // PER_WORD),
        SCALE: (rows, columns // GROUP),
        SHAPE: (2,),
    }
    dtypes = {PACKED: ("I32",), SCALE: PLAIN_DTYPES, SHAPE: ("I32", "I64")}[suffix]
    shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
    if dtype not in dtypes or columns % GROUP:
        raise ValueError(
            f"{path}: tensor {name!r} is {dtype}, of a matrix of {columns} columns: INT4 weights"
            f" need {' or '.join(dtypes)} here, and groups of {GROUP} columns"
        )
    wanted = {name: shapes[suffix]} if matrix in expected else {}
    _check_tensor(path, name, shape, wanted, file_of)
    file_of[name] = path
    if suffix == PACKED:
        _check_tensor(path, matrix, (rows, columns), expected, file_of)
        file_of[matrix] = path


def _list_parts(file_of: Mapping[str, Path]) -> set[str]:
    """Return the names of all parts of the INT4 matrices of which a part is there."""
    parts = filter(None, map(split_part, file_of))
    return {name for matrix, _ in parts for name in list_part_names(matrix)}


def _check_dtype(path: Path, name: str, dtype: str) -> None:
    """Raise ValueError for quantized values, which a cast without their scales would distort."""
    if dtype not in PLAIN_DTYPES or find_scaled_name(name):
        problem = f"is {dtype}" if dtype not in PLAIN_DTYPES else "holds scales of 8-bit values"
        raise ValueError(
            f"{path}: tensor {name!r} {problem}, so the model is quantized: {DEQUANTIZE_REMEDY}"
        )


SINGLE_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(?:gate|up|down)_proj\.weight")


def _check_tensor(
    path: Path, name: str, shape: Shape, expected: Mapping[str, Shape], file_of: Mapping[str, Path]
) -> None:
    """Raise ValueError unless the tensor is expected, well shaped and in no earlier file."""
    if name not in expected:
        remedy = "remove it, or correct config.json"
        if (single := SINGLE_EXPERT.fullmatch(name)) and f"{single[1]}.down_proj" in expected:
            remedy = (
                "each expert lies by itself, as transformers saves Qwen3.5; write the published"
                " form with mcore-rl-ckpt turn-experts"
            )
        raise ValueError(
            f"{path}: tensor {name!r} has no place in the model that config.json describes:"
            f" {remedy}"
        )
    if name in file_of:
        raise ValueError(
            f"{path}: tensor {name!r} is also in {file_of[name].name}: remove one of the two"
        )
    if shape != expected[name]:
        remedy = "config.json or the file belongs to another model"
        if len(shape) == 3 and (shape[0], *shape[:0:-1]) == expected[name]:
            remedy = (
                "each expert lies transposed, as transformers saves Qwen3-VL; write the published"
                " form with mcore-rl-ckpt turn-experts"
            )
        raise ValueError(
            f"{path}: tensor {name!r} has shape {shape}, by config.json it should be"
            f" {expected[name]}: {remedy}"
        )


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
    for path, members in sorted(by_file.items()):
        with safe_open(path, framework="pt") as file:
            for shard in members:
                read = _read_box(file, shard.box, file_of)
                if num_bad := count_not_finite(read):
                    raise ValueError(
                        f"{path}: tensor {shard.box.name!r} has {num_bad} of {read.numel()} values"
                        f" that are not finite (at {shard.box.start} to {shard.box.stop}): give"
                        " another model.path"
                    )
                shard.view(tensors).copy_(read)


def _read_box(file: Any, box: Box, file_of: Mapping[str, Path]) -> Tensor:
    """Return the elements of a box from its open file; INT4 words in the dtype of their scales."""
    words, scales, _ = list_part_names(box.name)
    if scales not in file_of:
        return file.get_slice(box.name)[tuple(map(slice, box.start, box.stop))]
    with safe_open(file_of[scales], framework="pt") as other:
        return read_slice(file.get_slice(words), other.get_slice(scales), box)


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
    (out_dir / INDEX).unlink(missing_ok=True)
    for stale in (*out_dir.glob("*.safetensors"), out_dir / MANIFEST):
        stale.unlink(missing_ok=True)
    filenames = [file.filename for file in (*files, *carried)]
    for filename in filenames:
        force(out_dir / (filename + TEMPORARY))
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

    Parts of INT4 matrices are left out, as exports have plain weights alone.
    """
    family = family_of(config)
    file_of: dict[str, Path] = {}
    if not any(hf_dir.glob("*.safetensors")):
        return file_of
    for path in list_checkpoint_files(hf_dir):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
                if family.is_carried(config, name) and not name.endswith((PACKED, SCALE, SHAPE)):
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

    The files have temporary names until `commit_export` renames them.

    but   HF names of tensors that other files have
    """
    written = []
    carried = list_carried_tensors(hf_dir, config)
    left = {name: path for name, path in carried.items() if name not in but}
    batches = _batch_tensors(left, max_file_bytes)
    for number, batch in enumerate(batches, start=1):
        filename = f"carried-{number:05d}.safetensors"
        save_tensors(batch, out_dir / (filename + TEMPORARY))
        written.append(CarriedFile(filename, tuple(batch), _count_bytes(batch)))
    return written


def _batch_tensors(file_of: dict[str, Path], max_file_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors by name, in batches of at most `max_file_bytes` or of one tensor."""
    batch: dict[str, Tensor] = {}
    for name, path in file_of.items():
        with safe_open(path, framework="pt") as file:
            tensor = file.get_tensor(name)
        if batch and _count_bytes(batch) + tensor.nbytes > max_file_bytes:
            yield batch
            batch = {}
        batch[name] = tensor
    if batch:
        yield batch


def _count_bytes(batch: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in batch.values())
