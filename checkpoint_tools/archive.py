"""Finds where the elements lie in a torch.save archive (zip) that holds one tensor.

    | header data.pkl | header data/0 | elements ... | crc | byteorder, version | directory |
    '---------- prefix --------------'              '----------- suffix -----------------'

The pickle is read into inert stand-ins, so a file cannot run code here.
"""

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zlib_ng import zlib_ng

from checkpoint_tools.stored import DTYPE_BYTES, Chunk
from mcore_rl.weights.box import contiguous_strides
from mcore_rl.weights.hf.checksums import ByteSpan
from mcore_rl.weights.megatron_files.metadata import READ_ERRORS
from mcore_rl.weights.models.table import Shape

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
LOCAL_HEADER = 30


@dataclass(frozen=True)
class Located:
    """The place of a chunk's elements in its file.

    start       byte of the first element
    around      checksums of the archive's bytes before and after the elements; empty for plain
                elements
    data_crc32  checksum that the archive itself records for the elements
    """

    start: int
    around: tuple[ByteSpan, ...] = ()
    data_crc32: int | None = None


class Locator:
    """Finds the elements in archives.

    A checkpoint has thousands of archives of few dtypes and shapes. Only the first of each kind is
    parsed; another is recognized by its bytes, which differ in checksums alone.
    """

    def __init__(self) -> None:
        self._forms: dict[tuple[str, Shape, int], _Form] = {}

    def locate(self, descriptor: int, chunk: Chunk) -> Located:
        """Locate a chunk's elements. Raises ValueError naming file and tensor if it is damaged."""
        if not chunk.is_archive:
            return Located(chunk.start)
        kind = (chunk.dtype, chunk.shape, chunk.num_bytes)
        if kind in self._forms:
            form = self._forms[kind]
            around = _read_around(descriptor, chunk, len(form.prefix))
            data_crc32 = form.data_crc32(*around)
            if data_crc32 is not None:
                return _locate_entry(chunk, around, data_crc32)
        try:
            prefix_bytes, own = _parse(descriptor, chunk)
        except READ_ERRORS as error:
            place = f"{chunk.where}: the archive at byte {chunk.start}"
            raise ValueError(f"{place} is damaged: {error or type(error).__name__}") from error
        prefix, suffix = _read_around(descriptor, chunk, prefix_bytes)
        if all(part in suffix for part in own):
            self._forms[kind] = _Form(prefix, suffix, own)
        return _locate_entry(chunk, (prefix, suffix), int.from_bytes(own[0], "little"))


class _Form:
    """The bytes around the elements that archives of one kind have in common.

    `own` are the parts of the suffix that differ between archives: the CRC-32 of the elements and,
    if torch wrote one, the archive's serialization id with its CRC-32.
    """

    def __init__(self, prefix: bytes, suffix: bytes, own: Sequence[bytes]) -> None:
        starts = [(suffix.index(part), len(part)) for part in own]
        self._places = [slice(start, start + size) for start, size in starts]
        self.prefix = prefix
        self._common = self._blank_own(suffix)

    def data_crc32(self, prefix: bytes, suffix: bytes) -> int | None:
        """Return the elements' CRC-32 as the archive records it; None for another form."""
        if prefix != self.prefix or self._blank_own(suffix) != self._common:
            return None
        data_crc32, *identity = (suffix[place] for place in self._places)
        if identity and zlib_ng.crc32(identity[0]) != int.from_bytes(identity[1], "little"):
            return None
        return int.from_bytes(data_crc32, "little")

    def _blank_own(self, suffix: bytes) -> bytes:
        """Blank the parts that differ, both here and where the zip directory repeats them."""
        for place in self._places:
            suffix = suffix.replace(suffix[place], bytes(place.stop - place.start))
        return suffix


def _read_around(descriptor: int, chunk: Chunk, prefix_bytes: int) -> tuple[bytes, bytes]:
    """Return the bytes before and after the elements of an archive."""
    suffix_bytes = chunk.num_bytes - prefix_bytes - chunk.data_bytes
    suffix_start = chunk.start + prefix_bytes + chunk.data_bytes
    prefix = os.pread(descriptor, prefix_bytes, chunk.start)
    suffix = os.pread(descriptor, suffix_bytes, suffix_start)
    return prefix, suffix


def _locate_entry(chunk: Chunk, around: tuple[bytes, bytes], data_crc32: int) -> Located:
    prefix, suffix = around
    start = chunk.start + len(prefix)
    before = ByteSpan(chunk.start, len(prefix), zlib_ng.crc32(prefix))
    after = ByteSpan(start + chunk.data_bytes, len(suffix), zlib_ng.crc32(suffix))
    return Located(start, (before, after), data_crc32)


def _parse(descriptor: int, chunk: Chunk) -> tuple[int, list[bytes]]:
    """Return the number of bytes before the elements, and the parts that `_Form` calls `own`.

    Raises one of READ_ERRORS if the archive does not hold just the chunk's tensor.
    """
    with zipfile.ZipFile(_FileRange(descriptor, chunk.start, chunk.num_bytes)) as archive:
        names = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        tensor = _Unpickler(io.BytesIO(archive.read(names["data.pkl"]))).load()
        byteorder = archive.read(names["byteorder"]) if "byteorder" in names else b"little"
        identity = names.get(".data/serialization_id")
        own = [archive.read(identity), _crc32_bytes(identity)] if identity else []
    if byteorder != b"little":
        raise ValueError(f"its byte order is {byteorder!r}, only little-endian data can be read")
    _check_tensor(tensor, chunk)
    info = names[f"data/{tensor.storage}"]
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != chunk.data_bytes:
        raise ValueError(f"its data has {info.file_size} bytes, it should have {chunk.data_bytes}")
    header = os.pread(descriptor, LOCAL_HEADER, chunk.start + info.header_offset)
    name_len, extra_len = struct.unpack("<HH", header[26:30])
    prefix_bytes = info.header_offset + LOCAL_HEADER + name_len + extra_len
    if header[:4] != b"PK\3\4" or prefix_bytes + chunk.data_bytes > chunk.num_bytes:
        raise ValueError("the header of its data is damaged")
    return prefix_bytes, [_crc32_bytes(info), *own]


def _check_tensor(tensor: object, chunk: Chunk) -> None:
    """Raise ValueError unless `tensor` is contiguous and has the chunk's dtype and shape."""
    if not isinstance(tensor, _Tensor):
        raise ValueError("it holds no tensor")
    if tensor.dtype != chunk.dtype:
        raise ValueError(f"it holds {tensor.dtype}, by the metadata it should be {chunk.dtype}")
    if tensor.shape != chunk.shape:
        raise ValueError(
            f"it holds shape {tensor.shape}, by the metadata it should be {chunk.shape}"
        )
    strides = contiguous_strides(tensor.shape)
    is_contiguous = tensor.offset == 0
    for size, stride, expected in zip(tensor.shape, tensor.strides, strides, strict=True):
        if size > 1 and stride != expected:
            is_contiguous = False
    if not is_contiguous:
        raise ValueError(
            f"its elements are not contiguous: strides {tensor.strides}, offset {tensor.offset}"
        )


def _crc32_bytes(info: zipfile.ZipInfo) -> bytes:
    return info.CRC.to_bytes(4, "little")


class _FileRange(io.RawIOBase):
    """The bytes [start, start + num_bytes) of an open file, as a file of their own."""

    def __init__(self, descriptor: int, start: int, num_bytes: int) -> None:
        self._descriptor = descriptor
        self._start = start
        self._size = num_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origins = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}
        at = offset + origins[whence]
        if at < 0:
            raise ValueError(f"an offset in it is negative ({at})")
        self._at = at
        return at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        count = left if size < 0 else min(size, left)
        data = os.pread(self._descriptor, count, self._start + self._at)
        self._at += len(data)
        return data


@dataclass(frozen=True)
class _Storage:
    """Stands for a torch storage in the pickle."""

    dtype: str
    name: str


@dataclass(frozen=True)
class _Tensor:
    """Stands for a tensor in the pickle; offset and strides are in elements."""

    dtype: str
    storage: str
    offset: int
    shape: Shape
    strides: Shape


def _rebuild_v2(
    storage: _Storage, offset: int, shape: Shape, strides: Shape, *_: object
) -> _Tensor:
    return _Tensor(storage.dtype, storage.name, offset, tuple(shape), tuple(strides))


def _rebuild_v3(
    storage: _Storage,
    offset: int,
    shape: Shape,
    strides: Shape,
    _grad: bool,
    _hooks: object,
    dtype: str,
) -> _Tensor:
    return _Tensor(dtype, storage.name, offset, tuple(shape), tuple(strides))


class _Unpickler(pickle.Unpickler):
    """Reads the data.pkl of a tensor; refuses every other class or function by name."""

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
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which no tensor needs: not loaded"
            )
        return known[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, name, _, _ = pid
        if kind != "storage" or not isinstance(dtype, str):
            raise pickle.UnpicklingError(f"it refers to {pid!r}, which is no storage")
        return _Storage(dtype, str(name))
