"""Puts the patches of sequences into batches, selects them, and keeps recent ones in a cache.

StoredBatch: sequences a0 a1 b0 of two stores       -->  places of their patches, by digest
TrainBatch:  a0 a1 | b0, micro-batches              -->  Images of a0 a1 | b0
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, compress
from typing import Generic, TypeVar

import torch

from mcore_rl.types import Images, Patches, StoredBatch, TrainBatch

Value = TypeVar("Value")
GroupRow = tuple[int, int]
"""(group, index in the group) of a row in a store."""
PatchesOf = Mapping[tuple[int, GroupRow], Sequence[Patches]]
"""(store, row) -> the patches of its images."""


class PatchCache(Generic[Value]):
    """Values by key, of at most `max_bytes` bytes together."""

    def __init__(
        self, max_bytes: int, on_forget: Callable[[Value], None] = lambda value: None
    ) -> None:
        """`on_forget` gets each value that was kept and is kept no longer."""
        self._max_bytes = max_bytes
        self._on_forget = on_forget
        self._entries: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self.num_bytes = 0
        """Bytes of all values."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> Value | None:
        """Return the value of a key, which counts as used; None if it is not kept."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: Hashable, value: Value, num_bytes: int) -> None:
        """Keep a value, and forget others until all fit; one that never fits is not kept."""
        self._forget(key)
        if num_bytes > self._max_bytes:
            return
        self._entries[key] = (value, num_bytes)
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self._forget(next(iter(self._entries)))

    def _forget(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry[1]
            self._on_forget(entry[0])


def rows_with_images(batch: StoredBatch) -> dict[int, list[GroupRow]]:
    """Return the rows of the batch that have images, each once, by store."""
    rows: dict[int, list[GroupRow]] = {}
    if batch.nums_images_N is None:
        return rows
    here = [n > 0 for n in batch.nums_images_N.tolist()]
    for store, row in dict.fromkeys(compress(_keys(batch), here)):
        rows.setdefault(store, []).append(row)
    return rows


def with_images(
    parts: Sequence[TrainBatch], batch: StoredBatch, patches: PatchesOf
) -> list[TrainBatch]:
    """Return micro-batches of `batch.parts` with their images; fillers get none."""
    keys = _keys(batch)
    ends = accumulate(batch.parts)
    return [
        replace(part, images=join_patches([patches.get(key, ()) for key in keys[end - num : end]]))
        for part, num, end in zip(parts, batch.parts, ends, strict=True)
    ]


def _keys(batch: StoredBatch) -> list[tuple[int, GroupRow]]:
    """Return (store, row) of each sequence."""
    rows = zip(batch.group_N.tolist(), batch.index_N.tolist(), strict=True)
    return list(zip(batch.store_N.tolist(), rows, strict=True))


def join_patches(sequences: Sequence[Sequence[Patches]]) -> Images | None:
    """Return the images of sequences, in order; None if there is none. The pixels are copied."""
    patches = [each for images in sequences for each in images]
    if not patches:
        return None
    return Images(
        torch.cat([each.pixels_PD for each in patches]),
        torch.tensor([each.grid for each in patches]),
        tuple(map(len, sequences)),
        torch.tensor([each.interval for each in patches]),
    )


def select_images(images: Images | None, groups: Sequence[Sequence[int]]) -> list[Images | None]:
    """Return the images of the sequences at each group's indices; None for a group without."""
    if images is None:
        return [None] * len(groups)
    sequences = list(split_images(images))
    return [join_patches([sequences[i] for i in indices]) for indices in groups]


def split_images(images: Images) -> Iterator[list[Patches]]:
    """Yield the images of each sequence, as views."""
    nums_patches = images.grids_I3.prod(-1).tolist()
    parts = iter(images.pixels_PD.split(nums_patches))
    grids = iter(images.grids_I3.tolist())
    intervals = iter(images.intervals().tolist())
    for num_images in images.nums_N:
        yield [Patches(next(parts), tuple(next(grids)), next(intervals)) for _ in range(num_images)]
