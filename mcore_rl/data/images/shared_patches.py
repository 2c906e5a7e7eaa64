"""Makes the patches of a node's images once, and shares them with the node's other processes.

    collector: PromptImage --processor--> file in shared memory, named by the digest
    engine, training ranks of the node: map the file, copy nothing

A file that is forgotten vanishes once nobody has it mapped. Its image can be placed again.
"""

import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mcore_rl.data.images.batch import PatchCache
from mcore_rl.process.disk import report_full_disk
from mcore_rl.process.folders import TempDir
from mcore_rl.types import Patches, PromptImage

SHARED_MEMORY = "/dev/shm"
PATCH_FILES = ".patches"
"""The suffix of the files."""
MAKE_TIMEOUT_S = 300.0
"""How long a thread waits for another one that makes the same patches."""


@dataclass(frozen=True)
class PlacedPatches:
    """Where the patches of an image lie on the machine that made them, and their shape.

    shape   patches, values of each
    grid    patches along time, height and width
    interval   rotary positions from one patch to the next along time
    """

    digest: str
    path: str
    shape: tuple[int, int]
    grid: tuple[int, int, int]
    interval: float = 1.0

    @property
    def num_bytes(self) -> int:
        return 4 * self.shape[0] * self.shape[1]


class SharedPatches:
    """Patches by digest, in files of at most `max_bytes` bytes together. Threads may share it."""

    def __init__(
        self, make: Callable[[PromptImage], Patches], max_bytes: int, parent: str = ""
    ) -> None:
        """`make` gives an image's patches; `parent` empty: shared memory if there is enough."""
        self._make = make
        self._max_bytes = max_bytes
        self._folder = TempDir(parent or roomy_folder(max_bytes))
        self._kept: PatchCache[PlacedPatches] = PatchCache(max_bytes, _remove)
        self._making: dict[str, Future[PlacedPatches]] = {}
        self._lock = threading.Lock()
        self.num_made = 0
        """Images that were processed so far."""

    def place(self, image: PromptImage) -> PlacedPatches:
        """Return where the patches of an image lie, and make them if they are not there.

        Raises BadImageError if the image is damaged, ValueError if its patches alone are too large,
        and TimeoutError if another thread takes too long to make them.
        """
        with self._lock:
            placed = self._kept.get(image.digest)
            if placed is not None:
                return placed
            others = self._making.get(image.digest)
            own: Future[PlacedPatches] = self._making.setdefault(image.digest, Future())
        if others is not None:
            return self._wait(others, image)
        try:
            placed = self._write(image, self._make(image))
        except BaseException as error:
            own.set_exception(error)
            raise
        else:
            own.set_result(placed)
            return placed
        finally:
            with self._lock:
                del self._making[image.digest]

    def read(self, image: PromptImage) -> Patches:
        """Return the patches of an image, mapped; see `place`."""
        placed = self.place(image)
        pixels_PD = map_patches(placed)
        if pixels_PD is None:  # forgotten since
            return self._make(image)
        return Patches(pixels_PD, placed.grid, placed.interval)

    def close(self) -> None:
        """Remove all files; those that are mapped stay readable."""
        self._folder.remove()

    def _wait(self, making: "Future[PlacedPatches]", image: PromptImage) -> PlacedPatches:
        try:
            return making.result(MAKE_TIMEOUT_S)
        except TimeoutError:
            raise TimeoutError(
                f"waited {MAKE_TIMEOUT_S:g} s for another thread to make patches of {image.where}"
            ) from None

    def _write(self, image: PromptImage, patches: Patches) -> PlacedPatches:
        if patches.num_bytes > self._max_bytes:
            raise ValueError(
                f"{image.where}: its patches take {patches.num_bytes} bytes, more than all that"
                f" are kept, {self._max_bytes}: raise data.images.cache_gib, or lower"
                " data.images.max_tokens"
            )
        path = Path(self._folder.path, image.digest + PATCH_FILES)
        shape = tuple(patches.pixels_PD.shape)
        with report_full_disk(path.parent):
            with open(f"{path}.tmp", "wb", buffering=0) as file:
                file.write(patches.pixels_PD.contiguous().numpy().data)
            os.replace(f"{path}.tmp", path)
        placed = PlacedPatches(
            image.digest, str(path), (shape[0], shape[1]), patches.grid, patches.interval
        )
        with self._lock:
            self.num_made += 1
            self._kept.put(image.digest, placed, placed.num_bytes)
        return placed


def map_patches(placed: PlacedPatches) -> Tensor | None:
    """Return the pixels [P, D] without a copy; None if they are gone or on another machine."""
    try:
        mapped = np.memmap(placed.path, np.float32, "c", shape=placed.shape)
    except (FileNotFoundError, ValueError):  # a ValueError: a file of another size
        return None
    return torch.from_numpy(mapped)


def roomy_folder(num_bytes: int) -> str:
    """Return the folder of shared memory if it has room, else that of temporary files."""
    if os.path.isdir(SHARED_MEMORY):
        status = os.statvfs(SHARED_MEMORY)
        if status.f_bavail * status.f_frsize > num_bytes:
            return SHARED_MEMORY
    return tempfile.gettempdir()


def _remove(placed: PlacedPatches) -> None:
    Path(placed.path).unlink(missing_ok=True)
