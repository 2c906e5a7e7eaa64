"""Says where a rank's files go: to a folder that all nodes share, or to the controller's node.

shared       rank --> file
not shared   rank --> file --bring--> file on the controller's node; the one here is removed
             rank <-- copy <--fetch-- file on the controller's node
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mcore_rl.process.disk import make_lasting, rename_whole
from mcore_rl.weights.hf.checksums import (
    FileSums,
    read_manifest,
    sum_small_files,
    write_manifest,
)

T = TypeVar("T")
FILE_MANIFEST = ".checksums.json"
"""Suffix of the checksums of a single file, until `commit_checkpoint` merges those of all files."""


class Storage(Protocol):
    """The run folder as a rank sees it. Folders and files are named by their paths there.

    All but `run` do nothing where the folder is shared.
    """

    def prepare(self, folder: Path) -> None:
        """Make the folder on this node, empty; several of its ranks may do so at once."""
        ...

    def bring(self, *files: Path) -> None:
        """Bring files from this node to the run folder and remove them here."""
        ...

    def bring_rest(self, folder: Path) -> None:
        """Bring all files of a folder, but not those of folders in it."""
        ...

    def leave(self, folder: Path) -> None:
        """Remove a folder of this node if it was fetched, or is empty by now."""
        ...

    def fetch(self, folder: Path) -> Path:
        """Return a folder on this node that has the files of the run folder's `folder`."""
        ...

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function of a module where the run folder is, and return its result."""
        ...


class SharedStorage:
    """A run folder that this node sees itself."""

    def prepare(self, folder: Path) -> None:
        pass

    def bring(self, *files: Path) -> None:
        pass

    def bring_rest(self, folder: Path) -> None:
        pass

    def leave(self, folder: Path) -> None:
        pass

    def fetch(self, folder: Path) -> Path:
        return folder

    def run(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args)


SHARED = SharedStorage()


def make_empty(folder: Path) -> None:
    """Make a folder without content; what was there is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    make_lasting(folder)


def commit_checkpoint(staging: Path, folder: Path) -> None:
    """Write the checksums of a complete checkpoint and give its folder the final name.

    All of it is on the disk before. A checkpoint of the same step keeps its name until then.
    """
    sums: dict[str, FileSums] = {}
    for path in sorted(staging.glob(f"*{FILE_MANIFEST}")):
        sums |= read_manifest(staging, path.name) or {}
        path.unlink()
    write_manifest(staging, sums | sum_small_files(staging, sums))
    rename_whole(staging, folder)
