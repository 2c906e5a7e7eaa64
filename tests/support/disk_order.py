"""A witness of renames: was all that gets a new name on the disk before, and the name after?"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_Forced = dict[int, int]


class DiskOrder:
    """The renames of a block.

    renamed    names of files and folders by the order of their renames
    too_early  what was renamed with content that was not forced to the disk since its last change
    unnamed    folders that were not forced to the disk after a rename in them
    """

    def __init__(self) -> None:
        self.renamed: list[str] = []
        self.too_early: list[str] = []
        self.unnamed: set[str] = set()
        self._forced: _Forced = {}

    def note_force(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        self._forced[status.st_ino] = status.st_mtime_ns
        self.unnamed.discard(os.readlink(f"/proc/self/fd/{descriptor}"))

    def note_rename(self, source: Path, target: Path) -> None:
        inside = [source, *source.rglob("*")] if source.is_dir() else [source]
        for path in inside:
            status = path.stat()
            if self._forced.get(status.st_ino) != status.st_mtime_ns:
                self.too_early.append(str(path))
        self.renamed.append(target.name)
        self.unnamed.add(str(target.parent))


@contextmanager
def watch_disk_order() -> Iterator[DiskOrder]:
    """Note what os.fsync, os.rename and os.replace of this process are called for."""
    order, force = DiskOrder(), os.fsync

    def note_force(descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        force(descriptor)
        order.note_force(number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", note_force)
        for name in ("rename", "replace"):
            move = getattr(os, name)

            def note_move(source: Any, target: Any, *args: Any, move: Any = move) -> None:
                order.note_rename(Path(source), Path(target))
                move(source, target, *args)

            patch.setattr(os, name, note_move)
        yield order
