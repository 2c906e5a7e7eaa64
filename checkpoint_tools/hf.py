"""A HuggingFace directory in, its tensors and where they lie out; index, files and config.json must agree."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zlib_ng import zlib_ng

from checkpoint_tools.files import check_manifest
from checkpoint_tools.hf_model import check_against_config
from checkpoint_tools.safetensors_file import read_header
from checkpoint_tools.stored import Checkpoint, StoredTensor
from mcore_rl.slices.hf.checksums import MANIFEST
from mcore_rl.slices.hf.folder import INDEX


def open_hf(folder: Path, use_sums: bool = True) -> Checkpoint:
    """Read and check the structure of a directory; ValueError names the file or tensor that is wrong.

    Names, shapes and dtypes are compared with config.json where its architecture is one that mcore_rl knows.
    """
    index = read_index(folder)
    names = sorted(set(index["weight_map"].values())) if index else _safetensors_files(folder)
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            first = next(key for key, file in (index or {})["weight_map"].items() if file == name)
            raise ValueError(f"{path}, named in {INDEX}, does not exist: it should hold {first!r}")
        for key, tensor in read_header(path).items():
            if key in tensors:
                raise ValueError(f"{path}: tensor {key!r} is also in {tensors[key].chunks[0].file}")
            tensors[key] = tensor
    if index is not None:
        _check_index(folder, index, tensors)
    sums = check_manifest(folder, names) if use_sums else None
    if sums is not None:
        _check_edges(folder, tensors, sums)
    facts = {"config": check_against_config(folder, tensors)}
    return Checkpoint("hf", folder, tensors, (), sums, facts)


def _safetensors_files(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise ValueError(
            f"{folder} has no .safetensors files and no .metadata: it is no checkpoint"
        )
    return names


def read_index(folder: Path) -> dict[str, Any] | None:
    """The index of a sharded directory; None where there is none. ValueError names one that is damaged."""
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        index = json.loads(path.read_text())
        weight_map = index["weight_map"]
        if not all(
            isinstance(file, str) and Path(file).name == file for file in weight_map.values()
        ):
            raise ValueError("weight_map names something that is no file of the directory")
        if not weight_map:
            raise ValueError("weight_map is empty")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    return index


def _check_index(
    folder: Path, index: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> None:
    path, weight_map = folder / INDEX, index["weight_map"]
    for name, file in weight_map.items():
        if name not in tensors:
            raise ValueError(f"{path}: tensor {name!r} should be in {file}, which does not have it")
        if tensors[name].chunks[0].file != file:
            raise ValueError(
                f"{path}: tensor {name!r} should be in {file}, it is in {tensors[name].chunks[0].file}"
            )
    for name, tensor in tensors.items():
        if name not in weight_map:
            raise ValueError(f"{folder / tensor.chunks[0].file}: tensor {name!r} is not in {INDEX}")
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    have = sum(tensor.num_bytes for tensor in tensors.values())
    if total is not None and total != have:
        raise ValueError(f"{path}: total_size is {total}, the tensors have {have} bytes")


def _check_edges(
    folder: Path, tensors: Mapping[str, StoredTensor], sums: Mapping[str, Any]
) -> None:
    """Each tensor has a checksum of its own, and headers, read already, agree with theirs."""
    spans = {
        (file, span.start): span.num_bytes for file, entry in sums.items() for span in entry.spans
    }
    for tensor in tensors.values():
        chunk = tensor.chunks[0]
        if chunk.num_bytes and spans.get((chunk.file, chunk.start)) != chunk.num_bytes:
            raise ValueError(
                f"{folder / chunk.file}: {MANIFEST} has no checksum for tensor {tensor.key!r}"
            )
    for file in sorted({tensor.chunks[0].file for tensor in tensors.values()}):
        header = sums[file].spans[0]
        with (folder / file).open("rb") as stream:
            if zlib_ng.crc32(stream.read(header.num_bytes)) != header.crc32:
                raise ValueError(f"{folder / file}: its header does not agree with {MANIFEST}")
