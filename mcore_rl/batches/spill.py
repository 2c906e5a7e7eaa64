"""Moves arrays from memory to files that vanish with the arrays.

A file has no name from the beginning: the disk gets its blocks back once nobody refers to the
arrays, also when the process is killed.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mcore_rl.process.disk import report_full_disk
from mcore_rl.types import Array


class SpillFiles:
    """Files of arrays in one folder."""

    def __init__(self, folder: str) -> None:
        """`folder` empty: the system's for temporary files. Raises ValueError if that is none."""
        self.folder = Path(folder or tempfile.gettempdir())
        if not self.folder.is_dir():
            raise ValueError(
                f"rollout.spill_dir={folder}: there is no such folder on this node; make it, or"
                " leave the option out to take the one for temporary files"
            )
        self.num_bytes = 0
        """Bytes moved so far."""

    def move(self, arrays: Sequence[Array]) -> list[Array]:
        """Return the arrays as they lie in one new file, read-only.

        Raises DiskFullError, naming the folder, if there is no room for them.
        """
        with report_full_disk(self.folder), tempfile.TemporaryFile(dir=self.folder) as file:
            places = []
            for array in arrays:
                places.append(file.tell())
                file.write(np.ascontiguousarray(array).data)
            file.flush()
            self.num_bytes += file.tell()
            return [
                np.memmap(file, array.dtype, "r", place, array.shape) if array.size else array
                for array, place in zip(arrays, places, strict=True)
            ]
