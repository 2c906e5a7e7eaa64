"""Finds equal images of a micro-batch, so that the tower runs once on each of them.

images    a a b a      -->  distinct images a b
rows of their tokens   -->  rows of the embeddings of a b, those of a three times
"""

import hashlib

import torch
from torch import Tensor

from mcore_rl.types import Images


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
