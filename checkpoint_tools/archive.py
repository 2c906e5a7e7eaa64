"""The zip archive that torch.save makes of one tensor: where its elements lie, and the bytes around them.

    | header data.pkl | header data/0 | elements ... | crc | byteorder, version | directory |
    '---------- prefix --------------'              '----------- suffix -----------------'

Nothing is unpickled but inert stand-ins, so a file cannot run code here.
"""

import io
import os
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from checkpoint_tools.stored import DTYPE_BYTES, Chunk
from mcore_rl.slices.checksums import Span
from mcore_rl.slices.coverage import contiguous_strides
from mcore_rl.slices.families.table import Shape

STORAGES = {
    "DoubleStorage": "float64",
    "LongStorage": "int64",
    "FloatStorage": "float32",
    "IntStorage": "int32",
    "BFloat16Storage": "bfloat16",
    "HalfStorage": "float16",
    "ShortStorage": "int16",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "BoolStorage": "bool",
}
READ_ERRORS = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    NotImplementedError,
    UnicodeDecodeError,
    EOFError,
    LookupError,
    AttributeError,
    TypeError,
    ValueError,
    OverflowError,
    MemoryError,
    RuntimeError,
)
"""What parsing damaged bytes with pickle and zipfile can raise."""
_LOCAL_HEADER = 30


@dataclass(frozen=True)
class Located:
    """Where the elements of a chunk lie in its file.

    around      checksums of the archive's bytes before and after them; nothing for plain elements
    data_crc32  what the elements' checksum should be by the archive's own account
    """

    start: int
    around: tuple[Span, ...] = ()
    data_crc32: int | None = None


def locate(descriptor: int, chunk: Chunk) -> Located:
    """Find the elements of a chunk; ValueError names file and tensor if the archive is damaged."""
    if not chunk.is_archive:
        return Located(chunk.start)
    try:
        return _locate(descriptor, chunk)
    except READ_ERRORS as error:
        raise ValueError(
            f"{chunk.where}: the archive at byte {chunk.start} is damaged: {error or type(error).__name__}"
        ) from error


def _locate(descriptor: int, chunk: Chunk) -> Located:
    with zipfile.ZipFile(_Stretch(descriptor, chunk.start, chunk.num_bytes)) as archive:
        names = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        found = _Reader(io.BytesIO(archive.read(names["data.pkl"]))).load()
        byteorder = archive.read(names["byteorder"]) if "byteorder" in names else b"little"
    if not isinstance(found, _Tensor):
        raise ValueError("it holds no tensor")
    if byteorder != b"little":
        raise ValueError(f"its byte order is {byteorder!r}, only little-endian data can be read")
    if found.dtype != chunk.dtype:
        raise ValueError(f"it holds {found.dtype}, by the metadata it should be {chunk.dtype}")
    if found.shape != chunk.shape:
        raise ValueError(f"it holds shape {found.shape}, by the metadata it should be {chunk.shape}")
    plain = zip(found.shape, found.strides, contiguous_strides(found.shape), strict=True)
    if found.offset or any(size > 1 and stride != wanted for size, stride, wanted in plain):
        raise ValueError(f"its elements are not contiguous: strides {found.strides}, offset {found.offset}")
    info = names[f"data/{found.storage}"]
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != chunk.data_bytes:
        raise ValueError(f"its data has {info.file_size} bytes, it should have {chunk.data_bytes}")
    header = os.pread(descriptor, _LOCAL_HEADER, chunk.start + info.header_offset)
    name_len, extra_len = struct.unpack("<HH", header[26:30])
    data_start = chunk.start + info.header_offset + _LOCAL_HEADER + name_len + extra_len
    data_stop, stop = data_start + chunk.data_bytes, chunk.start + chunk.num_bytes
    if header[:4] != b"PK\3\4" or data_stop > stop:
        raise ValueError("the header of its data is damaged")
    around = (
        _span(descriptor, chunk.start, data_start),
        _span(descriptor, data_stop, stop),
    )
    return Located(data_start, around, info.CRC)


def _span(descriptor: int, start: int, stop: int) -> Span:
    return Span(start, stop - start, zlib.crc32(os.pread(descriptor, stop - start, start)))


class _Stretch(io.RawIOBase):
    """Bytes [start, start + num_bytes) of an open file, as a file."""

    def __init__(self, descriptor: int, start: int, num_bytes: int) -> None:
        self._descriptor, self._start, self._size, self._at = descriptor, start, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if at < 0:
            raise ValueError(f"an offset in it is negative ({at})")
        self._at = at
        return at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        data = os.pread(self._descriptor, left if size < 0 else min(size, left), self._start + self._at)
        self._at += len(data)
        return data


@dataclass(frozen=True)
class _Storage:
    """What stands for a torch storage in the pickle."""

    dtype: str
    name: str


@dataclass(frozen=True)
class _Tensor:
    dtype: str
    storage: str
    offset: int
    shape: Shape
    strides: Shape


def _rebuild_v2(storage: _Storage, offset: int, shape: Shape, strides: Shape, *_: object) -> _Tensor:
    return _Tensor(storage.dtype, storage.name, offset, tuple(shape), tuple(strides))


def _rebuild_v3(
    storage: _Storage, offset: int, shape: Shape, strides: Shape, _grad: bool, _hooks: object, dtype: str
) -> _Tensor:
    return _Tensor(dtype, storage.name, offset, tuple(shape), tuple(strides))


class _Reader(pickle.Unpickler):
    """Reads data.pkl of a tensor; any other class or function is refused by name."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        if module == "torch" and name in DTYPE_BYTES:
            return name
        known = {
            ("torch._utils", "_rebuild_tensor_v2"): _rebuild_v2,
            ("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
            ("torch.storage", "UntypedStorage"): "uint8",
            ("torch", "Size"): tuple,
            ("collections", "OrderedDict"): OrderedDict,
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no tensor needs: not loaded")
        return known[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, name, _, _ = pid
        if kind != "storage" or not isinstance(dtype, str):
            raise pickle.UnpicklingError(f"it refers to {pid!r}, which is no storage")
        return _Storage(dtype, str(name))


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
    padding = -(start + _LOCAL_HEADER + len("archive/data/0") + 4) % 64
    buffer.write(_local("archive/data/0", data_bytes, 0, b"FB" + struct.pack("<H", padding) + bytes(padding)))
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
        raise ValueError(f"tensors of {dtype} cannot be written in torch_dist format: choose another dtype")

    class Storage:
        pass

    class Rebuilt:
        def __reduce__(self) -> tuple[Any, ...]:
            arguments = (Storage(), 0, tuple(shape), contiguous_strides(shape), False, OrderedDict())
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
    start, crc32 = first + out.tell(), zlib.crc32(data)
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
