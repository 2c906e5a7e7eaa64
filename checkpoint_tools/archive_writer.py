"""A zip archive around the elements of one tensor, as torch.save makes it: see archive.py."""

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
from mcore_rl.slices.families.table import Shape
from mcore_rl.slices.plan.coverage import contiguous_strides


@dataclass(frozen=True)
class Archive:
    """The bytes to write around the elements of a tensor; `suffix` makes the last from their CRC-32."""

    prefix: bytes
    data_bytes: int
    suffix: Callable[[int], bytes]
    num_bytes: int


def make_archive(dtype: str, shape: Shape) -> Archive:
    """An archive that torch.load (weights_only) reads as a tensor of `dtype` and `shape`."""
    data_bytes = prod(shape) * DTYPE_BYTES[dtype]
    before = [("archive/data.pkl", _pickle_tensor(dtype, shape))]
    after = [("archive/byteorder", b"little"), ("archive/version", b"3\n")]
    buffer = io.BytesIO()
    headers = [_append(buffer, name, data) for name, data in before]
    start = buffer.tell()
    padding = -(start + LOCAL_HEADER + len("archive/data/0") + 4) % 64
    buffer.write(
        _local("archive/data/0", data_bytes, 0, b"FB" + struct.pack("<H", padding) + bytes(padding))
    )
    prefix = buffer.getvalue()

    def suffix(crc32: int) -> bytes:
        tail = io.BytesIO()
        # Sizes of 4 GiB and more stand in the directory as zip64 fields; readers go by the directory.
        tail.write(struct.pack("<4sIQQ", b"PK\7\10", crc32, data_bytes, data_bytes))
        first = len(prefix) + data_bytes
        entries = [*headers, ("archive/data/0", start, data_bytes, crc32)]
        entries += [_append(tail, name, data, first) for name, data in after]
        at = first + tail.tell()
        directory = b"".join(_directory_entry(*entry) for entry in entries)
        return tail.getvalue() + directory + _end(len(entries), len(directory), at)

    return Archive(prefix, data_bytes, suffix, len(prefix) + data_bytes + len(suffix(0)))


def _pickle_tensor(dtype: str, shape: Shape) -> bytes:
    """What torch.save pickles of a contiguous tensor, protocol 2."""
    import torch

    storage_of = {dtype: name for name, dtype in STORAGES.items()}
    if dtype not in storage_of:
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
                return "storage", getattr(torch, storage_of[dtype]), "0", "cpu", prod(shape)
            return None

    out = io.BytesIO()
    Pickler(out, protocol=2).dump(Rebuilt())
    return out.getvalue()


def _append(out: io.BytesIO, name: str, data: bytes, first: int = 0) -> tuple[str, int, int, int]:
    """Write a small member; (name, its place in the archive, bytes, CRC-32)."""
    start, crc32 = first + out.tell(), zlib_ng.crc32(data)
    out.write(_local(name, len(data), crc32, b"", described=False) + data)
    return name, start, len(data), crc32


_LIMIT = 0xFFFFFFFF


def _local(name: str, size: int, crc32: int, extra: bytes, described: bool = True) -> bytes:
    shown = min(size, _LIMIT)
    flags = 0x808 if described else 0x800
    fields = (b"PK\3\4", 45, flags, 0, 0, 0, crc32, shown, shown, len(name), len(extra))
    return struct.pack("<4sHHHHHIIIHH", *fields) + name.encode() + extra


def _directory_entry(name: str, start: int, size: int, crc32: int) -> bytes:
    large = [value for value in (size, size, start) if value >= _LIMIT]
    extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    shown = min(size, _LIMIT)
    flags = 0x808 if name.endswith("data/0") else 0x800
    fields = (b"PK\1\2", 45, 45, flags, 0, 0, 0, crc32, shown, shown, len(name), len(extra))
    last = (0, 0, 0, 0, min(start, _LIMIT))
    return struct.pack("<4sHHHHHHIIIHHHHHII", *fields, *last) + name.encode() + extra


def _end(count: int, directory_bytes: int, at: int) -> bytes:
    end64 = b""
    if at >= _LIMIT:
        where = at + directory_bytes
        end64 = struct.pack(
            "<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, directory_bytes, at
        ) + struct.pack("<4sIQI", b"PK\6\7", 0, where, 1)
    fields = (b"PK\5\6", 0, 0, count, count, directory_bytes, min(at, _LIMIT), 0)
    return end64 + struct.pack("<4sHHHHIIH", *fields)
