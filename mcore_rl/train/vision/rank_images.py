"""The images of a micro-batch on one context-parallel rank: pixels, and places of their tokens.

Every rank of the first stage runs the whole tower on the distinct images of the micro-batch, once
each, and takes the embeddings of the tokens that it holds:

    images    a a b a      -->  distinct images a b
    rows of their tokens   -->  rows of the embeddings of a b, those of a three times

The operations of towers in an optimizer step are added up over all ranks. Only ranks of the first
stage see pixels, so only they know which images of a micro-batch are equal.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.data.images.places import ImageTokens, split_grids
from mcore_rl.device import device, on_device
from mcore_rl.train.runtime import rank_coordinate
from mcore_rl.types import Images, TrainBatch
from mcore_rl.weights.hf.flops import TowerFlops


def distinct_images(images: Images, nums_tokens: list[int]) -> tuple[Images, Tensor]:
    """Return the distinct images, and for each row of all images' embeddings the row of theirs.

    Gradients of equal images add up where their embeddings are taken. Without pixels, on the meta
    device, no tower runs, and all images are returned.

    nums_tokens   rows that each image takes
    """
    if images.pixels_PD.is_meta:
        return images, torch.arange(sum(nums_tokens))
    parts = images.pixels_PD.split(images.grids_I3.prod(-1).tolist())
    first_row: dict[bytes, int] = {}
    kept: list[int] = []
    rows: list[Tensor] = []
    num_rows = 0
    for number, (pixels_PD, num_tokens) in enumerate(zip(parts, nums_tokens, strict=True)):
        key = _content(pixels_PD, images.grids_I3[number])
        if key not in first_row:
            first_row[key] = num_rows
            num_rows += num_tokens
            kept.append(number)
        rows.append(torch.arange(first_row[key], first_row[key] + num_tokens))
    if len(kept) < len(parts):
        pixels_PD = torch.cat([parts[number] for number in kept])
        images = Images(pixels_PD, images.grids_I3[kept], (len(kept),))
    return images, torch.cat(rows)


def _content(pixels_PD: Tensor, grid_3: Tensor) -> bytes:
    """Return a hash of an image, at about a gigabyte a second."""
    found = hashlib.blake2b(grid_3.numpy().tobytes(), digest_size=16)
    found.update(pixels_PD.contiguous().numpy().data)
    return found.digest()


@dataclass(frozen=True)
class RankImages:
    """A micro-batch as the vision part of a model reads it; T local tokens.

    rotary_3P   int64, rotary positions of the whole micro-batch's P tokens, padding included
    rows_T      int64, row of the merged embeddings of the micro-batch's images that replaces the
                embedding of a local token; -1 for text
    images      the distinct images of the micro-batch; None if it has none
    """

    rotary_3P: Tensor
    rows_T: Tensor
    images: Images | None

    def on_device(self, *, images: bool) -> "RankImages":
        """Return a copy on the device, made asynchronously; pixels only if `images` says so.

        grids_I3 stays in host memory, where the tower computes its indices.
        """
        moved = replace(self, rotary_3P=on_device(self.rotary_3P), rows_T=on_device(self.rows_T))
        if self.images is None or not images:
            return replace(moved, images=None)
        pixels_PD = on_device(self.images.pixels_PD)
        return replace(moved, images=replace(self.images, pixels_PD=pixels_PD))


def make_rank_images(
    batch: TrainBatch, padded_N: Sequence[int], sources_T: Tensor, tokens: ImageTokens
) -> RankImages:
    """Return the part of a micro-batch's images on one rank.

    padded_N    padded lengths of the whole sequences
    sources_T   index in the micro-batch of each local token, -1 on padding
    Raises ValueError if an image has fewer placeholders than it takes.
    """
    images = batch.images
    parts_N = batch.token_ids_T.split(list(batch.lens_N))
    if images is None:
        grids_N = [torch.empty(0, 3, dtype=torch.int64)] * len(parts_N)
        intervals_N = [torch.empty(0)] * len(parts_N)
    else:
        grids_N = list(split_grids(images.grids_I3, images.nums_N))
        intervals_N = images.intervals().split(list(images.nums_N))
    rotary: list[Tensor] = []
    rows: list[Tensor] = []
    first = 0
    for ids_T, grids_I3, intervals_I, padded in zip(
        parts_N, grids_N, intervals_N, padded_N, strict=True
    ):
        rotary.append(tokens.rotary(ids_T, grids_I3, padded, intervals_I))
        rows_T = tokens.rows(ids_T, grids_I3)
        rows.append(torch.where(rows_T >= 0, rows_T + first, -1))
        first += sum(tokens.nums_tokens(grids_I3))
    local_T = torch.where(sources_T >= 0, torch.cat(rows)[sources_T.clamp(min=0)], -1)
    if images is None or not first:
        return RankImages(torch.cat(rotary, dim=1), local_T, None)
    distinct, rows_R = distinct_images(images, tokens.nums_tokens(images.grids_I3))
    local_T = torch.where(local_T >= 0, rows_R[local_T.clamp(min=0)], -1)
    return RankImages(torch.cat(rotary, dim=1), local_T, distinct)


def tower_work(
    flops: TowerFlops, micro_batches: Iterable[RankImages | None], part: str
) -> dict[str, float]:
    """Return the operations of the step's towers as a metric, 10**12; a collective over all ranks.

    Each data-parallel coordinate counts once, although all of its ranks of the first stage run the
    same tower.

    part   train.vision
    """
    operations = 0.0
    where = rank_coordinate()
    if where.pp == where.tp == where.cp == 0:
        for images in micro_batches:
            if images is not None and images.images is not None:
                operations += flops.count_training(images.images.grids_I3.tolist(), part)
    total = torch.tensor(operations / 1e12, device=device(), dtype=torch.float32)
    dist.all_reduce(total)
    return {"train/tower_tflop": float(total)}
