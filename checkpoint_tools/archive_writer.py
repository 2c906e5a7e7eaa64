"""Makes the bytes of torch.save's archive around a tensor's elements: see archive.py."""

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from zlib_ng import zlib_ng

from checkpoint_tools.archive import LOCAL_HEADER, STORAGES
from checkpoint_tools.stored import DTYPE_BYTES
from mcore_rl.weights.box import contiguous_strides
from mcore_rl.weights.models.table import Shape

DATA_NAME = "archive/data/0"
_LIMIT = 0xFFFFFFFF
"""Largest value of a 32-bit field; larger ones move to zip64 fields."""


@dataclass(frozen=True)
class Archive:
    """The bytes to write around the elements of a tensor.

    suffix      makes the bytes after the elements from the elements' CRC-32
    num_bytes   size of the whole archive
    """

    prefix: bytes
    data_bytes: int
    suffix: Callable[[int], bytes]
    num_bytes: int


def make_archive(dtype: str, shape: Shape) -> Archive:
    """Return an archive that torch.load (weights_only) reads as a tensor of `dtype` and `shape`.

    Raises ValueError for a dtype that torch has no storage type for.
    """
    data_bytes = prod(shape) * DTYPE_BYTES[dtype]
    after = [("archive/byteorder", b"little"), ("archive/version", b"3\n")]
    buffer = io.BytesIO()
    pickled = _append(buffer, "archive/data.pkl", _pickle_tensor(dtype, shape))
    start = buffer.tell()
    # An extra field of this length aligns the elements to 64 bytes, as torch.save does.
    padding = -(start + LOCAL_HEADER + len(DATA_NAME) + 4) % 64
    extra = b"FB" + struct.pack("<H", padding) + bytes(padding)
    buffer.write(_local_header(DATA_NAME, data_bytes, 0, extra))
    prefix = buffer.getvalue()

    def suffix(crc32: int) -> bytes:
        tail = io.BytesIO()
        # Readers take sizes from the directory, where those of 4 GiB and more are zip64 fields.
        tail.write(struct.pack("<4sIQQ", b"PK\7\10", crc32, data_bytes, data_bytes))
        first = len(prefix) + data_bytes
        entries = [pickled, (DATA_NAME, start, data_bytes, crc32)]
        entries += [_append(tail, name, data, first) for name, data in after]
        directory_start = first + tail.tell()
        directory = b"".join(_directory_entry(*entry) for entry in entries)
        end = _end_of_directory(len(entries), len(directory), directory_start)
        return tail.getvalue() + directory + end

    return Archive(prefix, data_bytes, suffix, len(prefix) + data_bytes + len(suffix(0)))


def _pickle_tensor(dtype: str, shape: Shape) -> bytes:
    """Return the pickle that torch.save writes for a contiguous tensor, in protocol 2."""
    import torch

    storage_names = {dtype: name for name, dtype in STORAGES.items()}
    if dtype not in storage_names:
        raise ValueError(
            f"tensors of {dtype} cannot be written in torch_dist format: choose another dtype"
        )

    class Storage:
        pass

    class Rebuilt:
        def __reduce__(self) -> tuple[Any, ...]:
            arguments = (
                Storage(),
                0,
                tuple(shape),
                contiguous_strides(shape),
                False,
                OrderedDict(),
            )
            return torch._utils._rebuild_tensor_v2, arguments  # type: ignore[attr-defined]

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            if isinstance(obj, Storage):
                return "storage", getattr(torch, storage_names[dtype]), "0", "cpu", prod(shape)
            return None

    out = io.BytesIO()
    Pickler(out, protocol=2).dump(Rebuilt())
    return out.getvalue()


def _append(out: io.BytesIO, name: str, data: bytes, first: int = 0) -> tuple[str, int, int, int]:
    """Write a small member to `out`, which begins at byte `first` of the archive.

    Returns (name, start in the archive, number of bytes, CRC-32).
    """
    start = first + out.tell()
    crc32 = zlib_ng.crc32(data)
    out.write(_local_header(name, len(data), crc32, b"", described=False) + data)
    return name, start, len(data), crc32


def _local_header(name: str, size: int, crc32: int, extra: bytes, described: bool = True) -> bytes:
    """`described`: the CRC-32 and the sizes follow the data, in a data descriptor."""
    shown = min(size, _LIMIT)
    flags = 0x808 if described else 0x800
    fields = (b"PK\3\4", 45, flags, 0, 0, 0, crc32, shown, shown, len(name), len(extra))
    return struct.pack("<4sHHHHHIIIHH", *fields) + name.encode() + extra


def _directory_entry(name: str, start: int, size: int, crc32: int) -> bytes:
    large = [value for value in (size, size, start) if value >= _LIMIT]
    extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    shown = min(size, _LIMIT)
    flags = 0x808 if name == DATA_NAME else 0x800
    fields = (b"PK\1\2", 45, 45, flags, 0, 0, 0, crc32, shown, shown, len(name), len(extra))
    last = (0, 0, 0, 0, min(start, _LIMIT))
    return struct.pack("<4sHHHHHHIIIHHHHHII", *fields, *last) + name.encode() + extra


def _end_of_directory(count: int, directory_bytes: int, start: int) -> bytes:
    """The records after a directory of `count` entries that begins at byte `start`."""
    end64 = b""
    if start >= _LIMIT:
        fields64 = (b"PK\6\6", 44, 45, 45, 0, 0, count, count, directory_bytes, start)
        end64 = struct.pack("<4sQHHIIQQQQ", *fields64)
        end64 += struct.pack("<4sIQI", b"PK\6\7", 0, start + directory_bytes, 1)
    fields = (b"PK\5\6", 0, 0, count, count, directory_bytes, min(start, _LIMIT), 0)
    return end64 + struct.pack("<4sHHHHIIH", *fields)
