"""Opens a HuggingFace directory and returns its tensors and their places in the files.

Index, files and config.json must agree.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zlib_ng import zlib_ng

from checkpoint_tools.files import check_manifest
from checkpoint_tools.hf_model import check_against_config
from checkpoint_tools.int4 import unpack_names
from checkpoint_tools.safetensors_file import read_header
from checkpoint_tools.stored import Checkpoint, StoredTensor
from mcore_rl.weights.hf.checksums import MANIFEST, read_json
from mcore_rl.weights.hf.folder import INDEX, find_other_format


def open_hf(folder: Path, use_sums: bool = True, *, either_way: bool = False) -> Checkpoint:
    """Read and check the structure of a directory.

    Names, shapes and dtypes are compared with config.json if mcore_rl knows its architecture.
    `use_sums` reads checksums.json, if there is one. `either_way` lets each stacked expert lie
    transposed, too, or by itself. Raises ValueError with the file or tensor that is wrong.
    """
    index = read_index(folder)
    names = sorted(set(index["weight_map"].values())) if index else _safetensors_files(folder)
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            assert index is not None
            first = next(key for key, file in index["weight_map"].items() if file == name)
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
    facts = {"config": check_against_config(folder, tensors, either_way=either_way)}
    return Checkpoint("hf", folder, tensors, (), sums, facts)


def open_plain(folder: Path, use_sums: bool = True) -> Checkpoint:
    """Open a directory as `open_hf` does, with INT4 weights as the matrices that they encode."""
    checkpoint = open_hf(folder, use_sums)
    return replace(checkpoint, tensors=unpack_names(checkpoint.tensors))


def _safetensors_files(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise ValueError(
            f"{folder} has no .safetensors files and no .metadata{find_other_format(folder)}"
        )
    return names


def read_index(folder: Path) -> dict[str, Any] | None:
    """Return the index of a sharded directory, or None. Raises ValueError if it is damaged."""
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        index = read_json(path)
        weight_map = index["weight_map"]
        for file in weight_map.values():
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(f"weight_map names {file!r}, which is not a file of the directory")
        if not weight_map:
            raise ValueError("weight_map is empty")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    return index


def _check_index(
    folder: Path, index: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> None:
    """Raise ValueError unless the index has every tensor, its file, and the total size."""
    path = folder / INDEX
    weight_map = index["weight_map"]
    for name, file in weight_map.items():
        if name not in tensors:
            raise ValueError(f"{path}: tensor {name!r} should be in {file}, which does not have it")
        actual = tensors[name].chunks[0].file
        if actual != file:
            raise ValueError(f"{path}: tensor {name!r} should be in {file}, it is in {actual}")
    for name, tensor in tensors.items():
        if name not in weight_map:
            raise ValueError(f"{folder / tensor.chunks[0].file}: tensor {name!r} is not in {INDEX}")
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    actual_total = sum(tensor.num_bytes for tensor in tensors.values())
    if total is not None and total != actual_total:
        raise ValueError(f"{path}: total_size is {total}, the tensors have {actual_total} bytes")


def _check_edges(
    folder: Path, tensors: Mapping[str, StoredTensor], sums: Mapping[str, Any]
) -> None:
    """Raise ValueError unless each tensor has a checksum of its own and headers agree with theirs.

    Headers are compared here because they have been read already.
    """
    spans: dict[tuple[str, int], int] = {}
    for file, entry in sums.items():
        for span in entry.spans:
            spans[file, span.start] = span.num_bytes
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
