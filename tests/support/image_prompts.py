"""Prompts with images whose patches are numbers made of their bytes, without a processor."""

import random

import torch

from mcore_rl.data.images.processor import digest_of
from mcore_rl.types import Patches, Prompt, PromptImage

WIDTH = 6
MERGE = 4
PLACEHOLDER = 90


def make_image(name: str, num_tokens: int = 2) -> PromptImage:
    data = name.encode()
    return PromptImage(digest_of(data, num_tokens), data, num_tokens, num_tokens, f"image {name}")


def make_patches(image: PromptImage) -> Patches:
    """Return random patches that the image's bytes decide; a side of two patches."""
    generator = torch.Generator().manual_seed(int(image.digest[:12], 16))
    num_patches = MERGE * image.num_tokens
    pixels_PD = torch.rand(num_patches, WIDTH, generator=generator)
    return Patches(pixels_PD, (1, 2, num_patches // 2), float(len(image.data)))


def make_image_prompt(index: int, chance: random.Random, most: int = 2) -> Prompt:
    """Return a prompt with up to `most` images, some of which other prompts have, too."""
    images = tuple(
        make_image(f"{chance.randrange(6)}", chance.randint(1, 3))
        for _ in range(chance.randint(0, most))
    )
    ids = [1]
    for image in images:
        ids += [PLACEHOLDER] * image.num_tokens + [2]
    return Prompt(index, tuple(ids), (), "unit", "7", images=images)
