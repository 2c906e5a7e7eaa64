"""Reads the header of a safetensors file, and makes one for tensors to be written.

| 8 bytes: length of the header | JSON: name -> dtype, shape, [start, stop) | elements, end to end |
"""

import json
import struct
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from checkpoint_tools.stored import DTYPE_BYTES, Chunk, StoredTensor
from mcore_rl.weights.models.table import Shape

MAX_HEADER_BYTES = 100_000_000
NAMES = {
    "F64": "float64",
    "I64": "int64",
    "F32": "float32",
    "I32": "int32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I16": "int16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "U8": "uint8",
    "I8": "int8",
    "BOOL": "bool",
}
"""safetensors' names of dtypes -> torch's."""
_NAME_OF_DTYPE = {dtype: name for name, dtype in NAMES.items()}


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name, in the order of their bytes.

    Raises ValueError with file and tensor if the header does not account for each byte once.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        lead = file.read(8)
        header_bytes = struct.unpack("<Q", lead)[0] if len(lead) == 8 else 0
        if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(
                f"{path} has {size} bytes and a header of {header_bytes}: it was truncated, or is"
                " not a safetensors file"
            )
        raw = file.read(header_bytes)
    try:
        header = json.loads(raw.decode(), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: its header is damaged: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: its header is damaged: it is not a JSON object")
    header.pop("__metadata__", None)
    first = 8 + header_bytes
    tensors = [_read_entry(path, name, entry, first) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.chunks[0].start, tensor.num_bytes))
    _check_tiling(path, tensors, first, size)
    return {tensor.key: tensor for tensor in tensors}


def _check_tiling(path: Path, tensors: Sequence[StoredTensor], first: int, size: int) -> None:
    """Raise ValueError unless sorted tensors make up the bytes [first, size) of a file."""
    at = first
    for tensor in tensors:
        start = tensor.chunks[0].start
        if start != at:
            problem = (
                "overlaps the one before"
                if start < at
                else f"leaves bytes {at} to {start} to nothing"
            )
            raise ValueError(f"{path}: tensor {tensor.key!r} at byte {start} {problem}")
        at += tensor.num_bytes
    if at != size:
        last = tensors[-1].key if tensors else "header"
        problem = "it was truncated" if at > size else "the rest belongs to nothing"
        raise ValueError(
            f"{path} has {size} bytes, its last tensor {last!r} ends at byte {at}: {problem}"
        )


def _no_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise ValueError(f"{name!r} is in it twice")
        entries[name] = value
    return entries


def _read_entry(path: Path, name: str, entry: Any, first: int) -> StoredTensor:
    try:
        dtype = entry["dtype"]
        shape = tuple(entry["shape"])
        start, stop = entry["data_offsets"]
        are_sizes = all(type(number) is int and number >= 0 for number in (*shape, start, stop))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: the header's entry of tensor {name!r} is damaged: {error!r}"
        ) from error
    if not are_sizes or dtype not in NAMES:
        raise ValueError(
            f"{path}: the header's entry of tensor {name!r} is damaged, or its dtype unknown:"
            f" {entry}"
        )
    num_bytes = prod(shape) * DTYPE_BYTES[NAMES[dtype]]
    if stop - start != num_bytes:
        raise ValueError(
            f"{path}: tensor {name!r} of {dtype} {list(shape)} has {stop - start} bytes, it should"
            f" have {num_bytes}"
        )
    chunk = Chunk(
        name, NAMES[dtype], (0,) * len(shape), shape, str(path), first + start, num_bytes, False
    )
    return StoredTensor(name, NAMES[dtype], shape, (chunk,))


def make_header(tensors: Mapping[str, tuple[str, Shape]]) -> tuple[bytes, dict[str, int], int]:
    """Lay out a file of `tensors`, name -> (dtype, shape).

    Returns the file's first bytes, the byte at which each tensor begins, and the file's size.
    Tensors of larger elements come first, which aligns all of them, as safetensors does.
    """
    order = sorted(tensors, key=lambda name: (-DTYPE_BYTES[tensors[name][0]], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    at = 0
    for name in order:
        dtype, shape = tensors[name]
        stop = at + prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {
            "dtype": _NAME_OF_DTYPE[dtype],
            "shape": list(shape),
            "data_offsets": [at, stop],
        }
        starts[name] = at
        at = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    starts = {name: first + start for name, start in starts.items()}
    return struct.pack("<Q", len(text)) + text, starts, first + at
