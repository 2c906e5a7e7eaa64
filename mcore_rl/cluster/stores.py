"""Reads and writes the sample stores of all collectors, from any process of the run.

Every read and write raises SamplesLostError if a store lost its process, once all other stores have
answered.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from torch import Tensor

from mcore_rl.batches.assembly import (
    OwnTokens,
    all_tokens,
    assemble,
    assemble_parts,
    scatter_parts,
)
from mcore_rl.batches.kept_rows import ReadRequest
from mcore_rl.cluster.answers import find_death
from mcore_rl.cluster.group import BULK
from mcore_rl.cluster.rank_actor import NotBuilt, Raised
from mcore_rl.data.images.batch import GroupRow, rows_with_images, with_images
from mcore_rl.data.images.shared_patches import PlacedPatches, map_patches
from mcore_rl.process.lost_samples import SamplesLostError, join_losses
from mcore_rl.types import Array, Patches, StoredBatch, TrainBatch


def share_array(array: Array) -> ray.ObjectRef:
    """Put a copy into Ray's object store, for one transfer to each node; return its reference."""
    return ray.put(array)


class StoreHandles:
    """Calls the collectors as stores, by number; implements workers.stores.SampleStores.

    Controller and ranks use the same object.
    """

    def __init__(self, actors: Sequence[Any], timeout_s: float) -> None:
        """`timeout_s` bounds each read and write, of all stores at once."""
        self._actors = actors
        self._timeout_s = timeout_s

    def read(self, requests: Mapping[int, ReadRequest]) -> dict[int, Mapping[str, Array]]:
        """Return columns by store and name. Raises RuntimeError naming a store that failed."""
        calls = {store: ("read", request) for store, request in requests.items()}
        return self._call(calls)

    def write(self, parts: Mapping[int, tuple[Array, Array, Mapping[str, Array]]]) -> None:
        """Write (group_N, index_N, columns by name) by store. Raises RuntimeError as `read`."""
        self._call({store: ("write", *part) for store, part in parts.items()})

    def assemble(self, batch: StoredBatch, *, with_pixels: bool = False) -> TrainBatch:
        """Return the batch with its tokens, and with its images if their pixels are wanted."""
        whole = assemble(batch, self.read)
        if not with_pixels:
            return whole
        parts = replace(batch, parts=(len(batch.lens_N),))
        return self.with_images([whole], parts, with_pixels=True)[0]

    def assemble_parts(
        self,
        batch: StoredBatch,
        layers: Sequence[int],
        own_tokens: OwnTokens = all_tokens,
        seen_tokens: OwnTokens = all_tokens,
    ) -> list[TrainBatch]:
        """Return the batch's micro-batches; see batches.assembly.assemble_parts."""
        return assemble_parts(batch, self.read, layers, own_tokens, seen_tokens)

    def with_images(
        self, parts: Sequence[TrainBatch], batch: StoredBatch, *, with_pixels: bool
    ) -> list[TrainBatch]:
        """Return the batch's micro-batches with the images of their sequences.

        with_pixels   False: only grids are read, and pixels are on the meta device
        """
        rows = rows_with_images(batch)
        if not rows:
            return list(parts)
        placed = self._call({store: ("place_images", own) for store, own in rows.items()})
        patches: dict[tuple[int, GroupRow], list[Patches]] = {}
        for store, by_row in placed.items():
            mapped = _map_by_digest(by_row.values(), with_pixels)
            for row, images in by_row.items():
                patches[store, row] = [mapped[each.digest] for each in images]
        far = {
            store: [row for row in own if _lack_pixels(patches[store, row])]
            for store, own in rows.items()
        }
        far = {store: own for store, own in far.items() if own and with_pixels}
        for store, by_digest in self._fetch(far).items():
            for row in far[store]:
                patches[store, row] = [
                    Patches(by_digest[each.digest], each.grid, each.interval)
                    for each in placed[store][row]
                ]
        return with_images(parts, batch, patches)

    def _fetch(self, rows: Mapping[int, Sequence[GroupRow]]) -> dict[int, dict[str, Tensor]]:
        """Return store -> digest -> pixels of images whose files cannot be mapped here."""
        calls = {store: ("put_images", own) for store, own in rows.items()}
        fetched = {}
        for store, references in self._call(calls).items():
            arrays = ray.get(list(references.values()), timeout=self._timeout_s)
            fetched[store] = {
                # A copy, because Ray's arrays are read-only and torch has no read-only tensors.
                digest: torch.from_numpy(array.copy())
                for digest, array in zip(references, arrays, strict=True)
            }
        return fetched

    def scatter_parts(self, batch: StoredBatch, columns: Mapping[str, Sequence[Tensor]]) -> None:
        """Write columns of token values, by micro-batch, to the stores of their samples."""
        scatter_parts(batch, columns, self.write)

    def _call(self, calls: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        refs = [
            self._actors[store].call.options(concurrency_group=BULK).remote(self._timeout_s, *call)
            for store, call in calls.items()
        ]
        until_s = time.monotonic() + self._timeout_s
        answers = {
            store: _answer(store, ref, max(until_s - time.monotonic(), 0.0))
            for store, ref in zip(calls, refs, strict=True)
        }
        if losses := [a for a in answers.values() if isinstance(a, SamplesLostError)]:
            raise join_losses(losses)
        return answers


def _map_by_digest(
    rows: Iterable[Sequence[PlacedPatches]], with_pixels: bool
) -> dict[str, Patches]:
    """Return the patches of all images that rows have, each mapped once."""
    placed = {each.digest: each for images in rows for each in images}
    return {digest: _map_placed(each, with_pixels) for digest, each in placed.items()}


def _map_placed(placed: PlacedPatches, with_pixels: bool) -> Patches:
    """Return the patches at a place; on the meta device if they are not here or not wanted."""
    pixels_PD = map_patches(placed) if with_pixels else None
    if pixels_PD is None:
        pixels_PD = torch.empty(placed.shape, device="meta")
    return Patches(pixels_PD, placed.grid, placed.interval)


def _lack_pixels(images: Sequence[Patches]) -> bool:
    return any(each.pixels_PD.is_meta for each in images)


def _answer(store: int, ref: Any, timeout_s: float) -> Any:
    """Return a store's answer, or a SamplesLostError if its process is gone."""
    name = f"sample store {store} (collector rank {store})"
    try:
        answer = ray.get(ref, timeout=timeout_s)
    except RayError as error:
        if (cause := find_death(error)) is None:
            raise
        return SamplesLostError(f"{name} died ({cause})", [store])
    if isinstance(answer, NotBuilt):
        return SamplesLostError(f"{name} died and is starting again", [store])
    if isinstance(answer, Raised):
        raise RuntimeError(f"{name}: {answer.summary}")
    return answer
