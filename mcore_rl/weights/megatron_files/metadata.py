"""Reads the `.metadata` file of a torch_dist checkpoint and returns where everything is stored.

The file is a pickle. It is read without importing what it names, so it cannot run code: each class
on the allow-list becomes an inert record, and any other name is refused.
"""

import io
import pickle
import re
import struct
import zipfile
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mcore_rl.weights.models.table import Shape

METADATA = ".metadata"
COMMON = "common.pt"
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
"""Exceptions that pickle and zipfile may raise on damaged bytes."""
_CHECKPOINT = "torch.distributed.checkpoint"
_RECORDS = {
    f"{_CHECKPOINT}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_CHECKPOINT}.filesystem": {"_StorageInfo", "_StoragePrefix"},
    f"{_CHECKPOINT}.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
}
"""Module -> its classes that a `.metadata` file may name: data classes, enums and paths.

Names are exact. A prefix would let `<module>.os.system` through, which pickle resolves by
attributes.
"""
_PLAIN = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "slice"): slice,
}


class Record:
    """Stands for an object whose class is not imported.

    Holds the object's state as attributes, or the arguments of its constructor in `args`.
    """

    def __init__(self, *args: object) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.args = tuple(state)

    def get(self, name: str) -> Any:
        """Return an attribute. Raises ValueError if the file gives none of that name."""
        if name not in self.__dict__:
            raise ValueError(f"a {type(self).__name__} lacks {name!r}")
        return self.__dict__[name]


@dataclass(frozen=True)
class Place:
    """The bytes [start, start + num_bytes) of a file: a chunk of a tensor, or an object."""

    key: str
    file: str
    start: int
    num_bytes: int


_ENUMS = ("WriteItemType", "_MEM_FORMAT_ENCODING")


def _make_member(enum: Any, name: object) -> Record:
    """Return the record of an enum's member, as CPython 3.11.0 to 3.11.3 pickles one: getattr."""
    is_enum = isinstance(enum, type) and issubclass(enum, Record) and enum.__name__ in _ENUMS
    if not (is_enum and isinstance(name, str) and name.isupper()):
        raise pickle.UnpicklingError("it names builtins.getattr of what is no enum: not loaded")
    return enum(name)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _make_member
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module == "torch" and re.fullmatch(r"(u?int|float|bfloat|complex)\w+|bool", name):
            return name
        if name in _RECORDS.get(module, ()):
            return type(name, (Record,), {})
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which no checkpoint needs: not loaded"
        )


def read_metadata(content: bytes, path: object) -> Record:
    """Return the Metadata object of a `.metadata` file as a record.

    Raises ValueError with `path` if the file is damaged or names anything off the allow-list.
    """
    try:
        metadata = _Unpickler(io.BytesIO(content)).load()
        if type(metadata).__name__ not in ("Metadata", "MCoreMetadata"):
            raise ValueError(f"it holds a {type(metadata).__name__}, not a Metadata")
        return metadata
    except READ_ERRORS as error:
        reason = error or type(error).__name__
        raise ValueError(
            f"{path} is damaged or was not written by torch.distributed.checkpoint: {reason}"
        ) from error


def read_places(metadata: Record) -> dict[tuple[str, Shape | None], Place]:
    """Return where everything is stored: (key, offset of the chunk) -> place.

    The offset of an object, which has no chunks, is None.
    Raises ValueError, without the path of the file, for an entry that is damaged, stored twice,
    stored transformed, or outside the checkpoint's folder.
    """
    places: dict[tuple[str, Shape | None], Place] = {}
    for index, info in metadata.get("storage_data").items():
        key = index.get("fqn")
        if not isinstance(key, str):
            raise ValueError(f"a key is a {type(key).__name__}, not a name")
        offset = index.__dict__.get("offset")
        if offset is not None:
            offset = read_shape(offset)
        if (key, offset) in places:
            raise ValueError(f"tensor {key!r} at {offset} is stored twice")
        if info.__dict__.get("transform_descriptors"):
            raise ValueError(f"tensor {key!r} is stored transformed, which cannot be read")
        places[key, offset] = _read_place(key, info)
    return places


def _read_place(key: str, info: Record) -> Place:
    file = info.get("relative_path")
    start = info.get("offset")
    num_bytes = info.get("length")
    if not isinstance(file, str) or not _is_plain(file):
        raise ValueError(
            f"tensor {key!r} is stored in {file!r}, which is not a file of the checkpoint"
        )
    are_numbers = isinstance(start, int) and isinstance(num_bytes, int)
    if not are_numbers or start < 0 or num_bytes <= 0:
        raise ValueError(
            f"tensor {key!r}: offset {start} and length {num_bytes} in {file} are not a byte range"
        )
    return Place(key, file, start, num_bytes)


@cache
def _is_plain(file: str) -> bool:
    """Return whether a path is the name of a file alone; a checkpoint has few of them."""
    return Path(file).name == file


def read_shape(value: Any) -> Shape:
    """Return a shape or an offset as a tuple. Raises ValueError unless it is made of sizes."""
    shape = tuple(value)
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        kinds = sorted({type(size).__name__ for size in shape})
        raise ValueError(f"a shape or offset is made of {', '.join(kinds)} instead of sizes")
    return shape
