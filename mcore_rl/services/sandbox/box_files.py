"""Writes files into a box and reads files of a box, as bundles of bytes.

A bundle is one line of JSON, [[path, number of bytes], ...], and then the bytes of all files.
Paths are relative to the box. A program may run meanwhile, so no link is ever followed.
"""

import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO

from mcore_rl.services.sandbox import isolation

_CHUNK_BYTES = 1 << 20
_MODE = 0o755


def write_bundle(files: Mapping[str, bytes], stream: IO[bytes]) -> None:
    index = [[path, len(content)] for path, content in files.items()]
    stream.write(json.dumps(index).encode() + b"\n")
    for content in files.values():
        stream.write(content)
    stream.flush()


def read_bundle(stream: IO[bytes]) -> dict[str, bytes]:
    """Return the files of a bundle; ValueError if it is cut off."""
    index = json.loads(stream.readline())
    files = {path: stream.read(num_bytes) for path, num_bytes in index}
    short = [path for path, num_bytes in index if len(files[path]) != num_bytes]
    if short:
        raise ValueError(f"the bundle of files ends within {short[0]}")
    return files


def unpack(box: str, stream: IO[bytes], owner: int | None) -> None:
    """Write the files of a bundle into the folder `box`, for the user `owner` if given.

    Raises OSError if one does not fit, or if a link lies on its way.
    """
    for path, content in read_bundle(stream).items():
        with _folder(box) as box_fd:
            _make_folders(box_fd, os.path.dirname(path), owner)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
            file_fd = isolation.open_beneath(box_fd, path, flags, _MODE)
        with os.fdopen(file_fd, "wb") as file:
            if not stat.S_ISREG(os.fstat(file_fd).st_mode):
                raise OSError(errno.EINVAL, "not a file", path)
            file.write(content)
            if owner is not None:
                os.fchown(file_fd, owner, owner)


def _make_folders(box_fd: int, folder: str, owner: int | None) -> None:
    parts = folder.split("/") if folder else []
    for i, name in enumerate(parts):
        parent = isolation.open_beneath(box_fd, "/".join(parts[:i]) or ".", os.O_PATH)
        try:
            os.mkdir(name, _MODE, dir_fd=parent)
            if owner is not None:
                os.chown(name, owner, owner, dir_fd=parent, follow_symlinks=False)
        except FileExistsError:
            pass
        finally:
            os.close(parent)


def pack(box: str, paths: Iterable[str] | None, max_bytes: int, stream: IO[bytes]) -> str:
    """Write a bundle of the files at `paths`, or of all, to `stream`.

    Skips paths that are no regular files, or lead over links. Returns a message if the files have
    more than `max_bytes`; the bundle is then empty.
    """
    found: dict[str, bytes] = {}
    num_left = max_bytes
    with _folder(box) as box_fd:
        for path in _all_files(box_fd) if paths is None else paths:
            content = _read(box_fd, path, num_left)
            if content is None:
                continue
            num_left -= len(content)
            if num_left < 0:
                write_bundle({}, stream)
                return f"the files have more than {max_bytes} bytes, counted up to {path}"
            found[path] = content
    write_bundle(found, stream)
    return ""


def _read(box_fd: int, path: str, num_left: int) -> bytes | None:
    """Return a regular file's bytes, at most one more than `num_left`; None if it is none."""
    try:
        file_fd = isolation.open_beneath(box_fd, path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # absent, a link, or unreadable even for the box's root: there is no such file
        return None
    with os.fdopen(file_fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(file_fd).st_mode):
            return None
        return file.read(num_left + 1)


def _all_files(box_fd: int) -> Iterator[str]:
    """Yield the paths of all regular files, in order; folders behind links are not entered."""
    for folder, folders, names, _ in os.fwalk(".", dir_fd=box_fd, follow_symlinks=False):
        folders.sort()
        for name in sorted(names):
            yield os.path.normpath(os.path.join(folder, name))


@contextmanager
def _folder(path: str) -> Iterator[int]:
    folder_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield folder_fd
    finally:
        os.close(folder_fd)
