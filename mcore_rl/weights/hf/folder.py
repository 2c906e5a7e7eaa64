"""The files of a HuggingFace directory: tensors, index, configuration and tokenizer."""

import heapq
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_rl.process.disk import force, force_to_disk
from mcore_rl.process.file_list import list_files, read_json
from mcore_rl.weights.hf.config import drop_absent_mtp, without_text_settings
from mcore_rl.weights.models.table import HfConfig

WEIGHT_SUFFIXES = (
    *(".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".ggml", ".onnx", ".onnx_data"),
    *(".ot", ".npz", ".distcp", ".tflite", ".mlmodel", ".pkl", ".nemo", ".part"),
)
"""Ends of the names of files with weights, in any format."""
OWN_FOLDER = ("config.json", ".metadata", "metadata.json")
"""Files that make a folder a model or a checkpoint of its own."""
INDEX = "model.safetensors.index.json"
TEMPORARY = ".part"
"""Suffix of a file that is not complete yet."""


def list_checkpoint_files(hf_dir: Path) -> list[Path]:
    """Return the safetensors files of a model directory, in order of their names.

    Raises ValueError if there are none, or naming one that the index lists and that is missing.
    """
    index = hf_dir / INDEX
    if index.is_file():
        names = _read_index_names(index)
    else:
        names = sorted(path.name for path in hf_dir.glob("*.safetensors"))
    if not names:
        raise ValueError(f"{hf_dir} has no .safetensors files{find_other_format(hf_dir)}")
    for name in names:
        if not (hf_dir / name).is_file():
            raise ValueError(
                f"{hf_dir / name}, named in {INDEX}, does not exist: download it again"
            )
    return [hf_dir / name for name in names]


_LENGTH_BYTES = 8
_OWN = "__metadata__"
_LFS = b"version https://git-lfs"


def check_header(path: Path) -> None:
    """Raise ValueError if a safetensors file is shorter than its header says, or no such file.

    Format: 8 bytes, little-endian, with the header's length; the header, in JSON; the tensors.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(_LFS))
    if start == _LFS:
        raise ValueError(f"{path} is a pointer of Git LFS and no weights: run `git lfs pull` there")
    needed = _LENGTH_BYTES + int.from_bytes(start[:_LENGTH_BYTES], "little")
    if size < max(needed, _LENGTH_BYTES + len("{}")):
        raise ValueError(
            f"{path} is cut off: it has {size} bytes, and a header of {needed}; download it again"
        )
    whole = needed + _find_end(path, needed - _LENGTH_BYTES)
    if size < whole:
        raise ValueError(f"{path} is cut off: it has {size} of {whole} bytes; download it again")


def _find_end(path: Path, header_bytes: int) -> int:
    """Return how many bytes the tensors of a safetensors file take; 0 if its header says nothing.

    What is wrong with such a header is left to who reads it.
    """
    with path.open("rb") as file:
        file.seek(_LENGTH_BYTES)
        header = file.read(header_bytes)
    try:
        tensors = {name: each for name, each in json.loads(header).items() if name != _OWN}
        return max((each["data_offsets"][1] for each in tensors.values()), default=0)
    except (ValueError, LookupError, TypeError, AttributeError):
        return 0


def find_other_format(hf_dir: Path) -> str:
    """Return what to do about a directory without safetensors files; it names one with weights."""
    found = [path.name for path in sorted(hf_dir.iterdir()) if path.name.endswith(WEIGHT_SUFFIXES)]
    if not found:
        return ": it is not a checkpoint; download the model, or save it in that format"
    return (
        f", only {found[0]}: load and save it with transformers, which writes safetensors:"
        f" AutoModelForCausalLM.from_pretrained({str(hf_dir)!r}, dtype='auto')"
        ".save_pretrained(<directory>), and the tokenizer likewise"
    )


def _read_index_names(index: Path) -> list[str]:
    try:
        names = set(read_json(index)["weight_map"].values())
        if not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise ValueError("weight_map names files that are not in the directory")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is damaged: {error!r}") from error
    return sorted(names)


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
    """Copy tokenizer files from `side_files_from`, write config.json, and write the index last.

    All other files of the folder are on the disk before, so that no index names a lost file.
    """
    if side_files_from is not None:
        _copy_side_files(side_files_from, out_dir)
    whole = drop_absent_mtp(config, weight_map)
    _write_json(out_dir / "config.json", without_text_settings(whole))
    force_to_disk(out_dir)
    write_index(out_dir, weight_map, total_bytes)


def write_index(out_dir: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    """Write the index: `weight_map` is HF name -> file, `total_bytes` those of all tensors."""
    _write_json(
        out_dir / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    )


def list_side_files(source: Path) -> tuple[list[str], list[str]]:
    """Return the files of a model directory that go into exports, and those that are left out.

    Both are paths relative to `source`. Weights of any format, their indexes and checkpoints in
    folders are left out; hidden files are in neither list.
    """
    kept: list[str] = []
    left: list[str] = []
    for name in list_files(source):
        if name != "config.json":
            (left if _is_weights(source, name) else kept).append(name)
    return kept, left


def _is_weights(source: Path, name: str) -> bool:
    *folders, file = Path(name).parts
    above = (source.joinpath(*folders[: i + 1]) for i in range(len(folders)))
    return (
        ".safetensors" in file
        or file.endswith(WEIGHT_SUFFIXES)
        or (file.endswith(".index.json") and "model" in file)
        or any((folder / mark).exists() for folder in above for mark in OWN_FOLDER)
    )


def _copy_side_files(source: Path, out_dir: Path) -> None:
    """Copy what belongs to the model beside its weights; print the files and what is left out."""
    if source.resolve() == out_dir.resolve():
        return
    kept, left = list_side_files(source)
    for name in kept:
        (out_dir / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, out_dir / name)  # permissions are those of new files
    others = [name for name in left if ".safetensors" not in name]  # those are converted
    omitted = f"; left out: {', '.join(others)}" if others else ""
    print(f"copied from {source}: {', '.join(kept) or 'nothing'}{omitted}")


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    temporary = path.with_name(path.name + TEMPORARY)
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    force(temporary)
    temporary.rename(path)
