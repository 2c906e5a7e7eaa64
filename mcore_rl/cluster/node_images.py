"""The images of a node's samples: their patches in shared memory, or in Ray's object store.

rank on this node        maps the files that `place` names
rank on another node     gets the objects of `put`, which Ray brings to each node once
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from mcore_rl.batches.sample_store import SampleStore
from mcore_rl.data.images.batch import GroupRow, PatchCache
from mcore_rl.data.images.shared_patches import PlacedPatches, SharedPatches


@dataclass(frozen=True)
class PatchMaker:
    """How a node's process makes patches, and how many bytes of them it keeps.

    folder   model directory with the image processor
    """

    folder: Path
    cache_bytes: int

    def make(self) -> SharedPatches:
        """Raises ValueError if the directory has no image processor that can be opened."""
        from mcore_rl.data.images.processor import ImageProcessor

        processor = ImageProcessor(self.folder, cache_bytes=0)
        return SharedPatches(processor.patches_of, self.cache_bytes)


class NodeImages:
    """The patches of the images of the rows in a store."""

    def __init__(self, maker: PatchMaker, store: SampleStore) -> None:
        self._store = store
        self.patches = maker.make()
        self._objects: PatchCache[Any] = PatchCache(maker.cache_bytes)
        """Digest -> reference to an object in Ray's store, which it keeps alive."""

    def place(self, rows: Sequence[GroupRow]) -> dict[GroupRow, list[PlacedPatches]]:
        """Return where the patches of each row lie, in the order of its images.

        Raises KeyError for a row that is not in the store.
        """
        return {
            row: [self.patches.place(image) for image in self._store.images(*row)] for row in rows
        }

    def put(self, rows: Sequence[GroupRow]) -> dict[str, Any]:
        """Return references to the patches of rows, arrays [P, D], by digest."""
        references: dict[str, Any] = {}
        for image in {i.digest: i for row in rows for i in self._store.images(*row)}.values():
            reference = self._objects.get(image.digest)
            if reference is None:
                patches = self.patches.read(image)
                reference = ray.put(patches.pixels_PD.numpy())
                self._objects.put(image.digest, reference, patches.num_bytes)
            references[image.digest] = reference
        return references

    def close(self) -> None:
        self.patches.close()
