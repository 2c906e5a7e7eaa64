"""Refuses checkpoint files that would take the reader all its time or memory.

A pickle of a few hundred bytes can hold tuples whose hash takes 2^n steps, and an archive of a few
kilobytes can unpack to terabytes. Archives are bounded by their directory. Pickles are read first
by a process with a deadline and a limit of memory, which imports nothing that they name:

    .metadata, common.pt, objects --> process: inert objects --> in time? --> read here
"""

import io
import json
import pickle
import resource
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import IO, Any

from mcore_rl.weights.megatron_files.metadata import (
    COMMON,
    METADATA,
    READ_ERRORS,
    read_metadata,
    read_places,
)

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
        file = _last_line(error.stdout) or str(folder)
        raise ValueError(
            f"{file} cannot be read within {deadline_s:.0f} s: it is damaged or hostile, not loaded"
        ) from None
    if done.returncode == 0:
        return
    file = _last_line(done.stdout) or str(folder)
    if done.returncode == _NO_MEMORY:
        raise ValueError(
            f"{file} takes more than {limit >> 20} MiB of memory to read: it is damaged or hostile,"
            " not loaded"
        )
    reason = _last_line(done.stderr) or f"status {done.returncode}"
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
        objects = {(p.file, p.start): p for (_, offset), p in places.items() if offset is None}
        for place in objects.values():
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


def _last_line(output: bytes | None) -> str:
    lines = (output or b"").decode(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "")
