"""Turns a HuggingFace directory into a Megatron checkpoint, which any layout can load."""

import io
import json
import pickle
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpoint_tools.archive_writer import make_archive
from checkpoint_tools.assembly import Assembly
from checkpoint_tools.hf import open_plain
from checkpoint_tools.hf_model import find_dtype, read_config
from checkpoint_tools.megatron_model import (
    Wanted,
    extra_state_keys,
    megatron_assemblies,
    megatron_tensors,
)
from checkpoint_tools.optimizer import optimizer_from_hf
from checkpoint_tools.options import Effort
from checkpoint_tools.output import OutputFile, Task, compute_share
from checkpoint_tools.produce import ConversionReport, produce
from checkpoint_tools.staging import refuse_existing
from checkpoint_tools.torch_dist import BACKEND, METADATA, open_torch_dist
from mcore_rl.weights.megatron_files.metadata import COMMON_OBJECT
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.table import Shape

Stored = Mapping[tuple[str, Shape | None], _StorageInfo]


def from_hf(
    source_hf: Path,
    out: Path,
    dtype: str | None,
    optimizer: Path | None,
    max_file_bytes: int,
    effort: Effort,
) -> ConversionReport:
    """Write the model of `source_hf` to `out`, a checkpoint that any layout can load.

    optimizer   folder of the state that `to_hf` wrote, to continue training; None starts at step 0
    dtype       of the result, except for tensors whose dtype the family's table fixes; None keeps
                the model's
    Raises ValueError with the file or tensor that is wrong.
    """
    refuse_existing(out)
    config = read_config(source_hf)
    source = open_plain(source_hf)
    left_out = family_of(config).find_left_out(config)
    chunks = {
        key: tensor.chunks[0] for key, tensor in source.tensors.items() if key not in left_out
    }
    wanted = megatron_tensors(config, dtype or find_dtype(config, source.tensors))
    objects = extra_state_keys(config)
    boxes = megatron_assemblies(wanted, chunks, config, source_hf)
    sources = [source]
    common: dict[str, Any] = {"step": 0, "extra": {}}
    if optimizer is not None:
        state, state_boxes, state_common = optimizer_from_hf(optimizer, wanted, config)
        sources.append(state)
        boxes += state_boxes
        common |= state_common
    total_bytes = sum(assembly.num_bytes for _, _, assembly in boxes)
    # No layout is recorded: there are no states of its ranks' random generators to continue with.
    head = _encode_objects(objects, {**common, "layout": {}})
    files, stored = _lay_out(boxes, head, compute_share(total_bytes, max_file_bytes))
    tensors = list({tensor.key: tensor for tensor, _, _ in boxes}.values())
    describe = partial(_write_small_files, tensors=tensors, objects=[*head], stored=stored)
    expected = {tensor.key: (tensor.dtype, tensor.shape) for tensor in tensors}
    return produce(out, sources, files, effort, describe, open_torch_dist, expected)


def _encode_objects(empty: Sequence[str], common: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the objects by key as megatron-core stores them: an archive of a list of one."""
    nothing = _encode([None])
    return {COMMON_OBJECT: _encode([common]), **dict.fromkeys(empty, nothing)}


def _encode(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _lay_out(
    boxes: Sequence[tuple[Wanted, Shape, Assembly]],
    objects: Mapping[str, bytes],
    max_file_bytes: int,
) -> tuple[list[OutputFile], dict[tuple[str, Shape | None], _StorageInfo]]:
    """Deal out boxes and objects to files of about `max_file_bytes`, one after the other.

    Returns the files, and where each box (key, offset) and object (key, None) is stored. Objects
    lie at the beginning of the first file; equal ones share one place.
    """
    stored: dict[tuple[str, Shape | None], _StorageInfo] = {}
    files: list[OutputFile] = []
    name = _filename(0)
    starts: dict[bytes, int] = {}
    at = 0
    for key, content in objects.items():
        if content not in starts:
            starts[content] = at
            at += len(content)
        stored[key, None] = _StorageInfo(name, starts[content], len(content))
    head = b"".join(starts)
    tasks: list[Task] = []
    for tensor, offset, assembly in boxes:
        num_bytes = make_archive(assembly.dtype, assembly.shape).num_bytes
        if at and at + num_bytes > max_file_bytes:
            files.append(OutputFile(name, at, b"" if files else head, tuple(tasks)))
            name = _filename(len(files))
            at = 0
            tasks = []
        tasks.append(Task(name, at, assembly, is_archive=True))
        stored[tensor.key, offset] = _StorageInfo(name, at, num_bytes)
        at += num_bytes
    files.append(OutputFile(name, at, b"" if files else head, tuple(tasks)))
    return files, stored


def _filename(number: int) -> str:
    return f"__0_{number}.distcp"


def _write_small_files(
    folder: Path, tensors: Sequence[Wanted], objects: Sequence[str], stored: Stored
) -> None:
    """Write .metadata and metadata.json."""
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        tensor.key: TensorStorageMetadata(
            TensorProperties(getattr(torch, tensor.dtype)),
            torch.Size(tensor.shape),
            [ChunkStorageMetadata(torch.Size(at), torch.Size(shape)) for at, shape in tensor.boxes],
        )
        for tensor in tensors
    }
    entries |= {key: BytesStorageMetadata() for key in objects}
    storage = {MetadataIndex(key, offset): info for (key, offset), info in stored.items()}
    with (folder / METADATA).open("wb") as file:
        pickle.dump(Metadata(entries, storage_data=storage), file)
    (folder / "metadata.json").write_text(json.dumps(BACKEND))
