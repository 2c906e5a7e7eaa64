"""Reads the `.metadata` file of a torch_dist checkpoint and returns where everything is stored.

The file is a pickle. It is read without importing what it names, so it cannot run code: each class
on the allow-list becomes an inert record, and any other name is refused.

Files that would take the reader all its time or memory are refused. A pickle of a few hundred bytes
can hold tuples whose hash takes 2^n steps, and an archive of a few kilobytes can unpack to
terabytes. Archives are bounded by their directory. Pickles are read first by a process with a
deadline and a limit of memory, which imports nothing that they name:

    .metadata, objects (common.pt) --> process: inert objects --> in time? --> read here
"""

import io
import json
import pickle
import re
import resource
import struct
import subprocess
import sys
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO, Any

from mcore_rl.weights.models.table import Shape

METADATA = ".metadata"
COMMON = "common.pt"
"""File of what is not sharded (steps, learning rates), as megatron-core wrote it until 0.16."""
COMMON_OBJECT = "common_state/shard_0_1"
"""Key of the object that holds the same since megatron-core 0.17: a list of one dictionary."""
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


def read_metadata_of(folder: Path) -> Record:
    """Return the Metadata object of a checkpoint's folder; as `read_metadata`."""
    path = folder / METADATA
    return read_metadata(path.read_bytes(), path)


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


def find_common(folder: Path, places: Mapping[tuple[str, Shape | None], Place]) -> Place | None:
    """Return the place of the object that holds what is not sharded; None if common.pt does.

    `places`: as of `read_places`. Raises ValueError unless it is exactly one of both.
    """
    place = places.get((COMMON_OBJECT, None))
    has_file = (folder / COMMON).is_file()
    if place is None and not has_file:
        raise ValueError(
            f"{folder} has neither {COMMON} nor an object {COMMON_OBJECT!r}: the checkpoint was not"
            " written to its end"
        )
    if place is not None and has_file:
        raise ValueError(
            f"{folder} has {COMMON} and an object {COMMON_OBJECT!r}, written by two versions of"
            " megatron-core: the folder mixes two checkpoints"
        )
    return place


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


DEADLINE_S = 20.0
DEADLINE_S_PER_MIB = 1.0
MEMORY_BYTES = 4 << 30
MEMORY_PER_BYTE = 60
"""Memory that a pickle may take per byte of the file; objects of Python are larger than pickles."""
_IN_PROCESS = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    f" from {__name__} import read_all; read_all(*json.loads(sys.argv[2]))"
)
_NO_MEMORY = 3


def check_bounded(folder: Path, deadline_s: float | None = None) -> None:
    """Raise ValueError with the file of a checkpoint that takes too much time or memory to read.

    Whatever else is wrong with the files is left to those who read them. With Python, the process
    takes about 0.1 s.

    deadline_s   None: DEADLINE_S, and DEADLINE_S_PER_MIB of pickles
    """
    num_bytes = sum(
        path.stat().st_size for path in (folder / METADATA, folder / COMMON) if path.is_file()
    )
    if deadline_s is None:
        deadline_s = DEADLINE_S + DEADLINE_S_PER_MIB * num_bytes / (1 << 20)
    limit = MEMORY_BYTES + MEMORY_PER_BYTE * num_bytes
    arguments = [json.dumps(sys.path), json.dumps([str(folder), limit])]
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _IN_PROCESS, *arguments],
            capture_output=True,
            timeout=deadline_s,
        )
    except subprocess.TimeoutExpired as error:
        file = _take_last_line(error.stdout) or str(folder)
        raise ValueError(
            f"{file} cannot be read within {deadline_s:.0f} s: it is damaged or hostile, not loaded"
        ) from None
    if done.returncode == 0:
        return
    file = _take_last_line(done.stdout) or str(folder)
    if done.returncode == _NO_MEMORY:
        raise ValueError(
            f"{file} takes more than {limit >> 20} MiB of memory to read: it is damaged or hostile,"
            " not loaded"
        )
    reason = _take_last_line(done.stderr) or f"status {done.returncode}"
    raise ValueError(f"{file} ends the process that reads it ({reason}): not loaded")


def check_archive(file: IO[bytes] | Path, num_bytes: int) -> None:
    """Raise ValueError if an archive of torch.save unpacks to more than its `num_bytes`.

    torch stores its members as they are. Raises one of READ_ERRORS if it is no archive.
    """
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    packed = next((m.filename for m in members if m.compress_type != zipfile.ZIP_STORED), None)
    if packed is not None:
        raise ValueError(f"{packed!r} in it is compressed, as torch.save writes nothing")
    unpacked_bytes = sum(member.file_size for member in members)
    if unpacked_bytes > num_bytes:
        raise ValueError(f"it has {num_bytes} bytes and unpacks to {unpacked_bytes}")


def read_all(folder: str, limit_bytes: int) -> None:
    """Read all pickles of a checkpoint; print each file first. Ends this process if memory ends."""
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    path = Path(folder) / METADATA
    try:
        print(path, flush=True)
        places = read_places(read_metadata(path.read_bytes(), path)) if path.is_file() else {}
        path = Path(folder) / COMMON
        if path.is_file():
            print(path, flush=True)
            _read_archive(path.read_bytes())
        objects = {replace(p, key="") for (_, offset), p in places.items() if offset is None}
        for place in sorted(objects, key=lambda place: (place.file, place.start)):
            path = Path(folder) / place.file
            print(path, flush=True)
            with path.open("rb") as file:
                file.seek(place.start)
                _read_archive(file.read(place.num_bytes))
    except (*READ_ERRORS, OSError) as error:
        if isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError):
            sys.exit(_NO_MEMORY)


def _read_archive(content: bytes) -> None:
    """Read the pickle of an archive into inert objects; one that is wrong is left to the reader."""
    try:
        check_archive(io.BytesIO(content), len(content))
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for name in archive.namelist():
                if name.endswith("data.pkl"):
                    _InertUnpickler(io.BytesIO(archive.read(name))).load()
    except MemoryError:
        raise
    except READ_ERRORS:
        return


class _Inert(dict[Any, Any]):
    """Stands for any class, function and object that a pickle names."""

    def __new__(cls, *args: object, **kwargs: object) -> "_Inert":
        return super().__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def __call__(self, *args: object, **kwargs: object) -> "_Inert":
        return _Inert()

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __setstate__(self, state: object) -> None: ...

    def append(self, value: object) -> None: ...

    def extend(self, values: object) -> None: ...

    def add(self, value: object) -> None: ...


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Inert

    def persistent_load(self, pid: Any) -> Any:
        return _Inert()


def _take_last_line(output: bytes | None) -> str:
    lines = (output or b"").decode(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "")
