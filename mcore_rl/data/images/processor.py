"""Turns images into patches with the image processor of the model directory.

Engines get these patches, too: torchvision's resizing, which SGLang would use on a GPU, gives other
pixels than Pillow's (docs/vision.md).
"""

import hashlib
from pathlib import Path
from typing import Any

import torch

from mcore_rl.data.images.decode import ImageSize, decode
from mcore_rl.data.images.encoded import EncodedImage
from mcore_rl.data.images.patch_cache import PatchCache
from mcore_rl.types import Patches, PromptImage


def digest_of(data: bytes, most_tokens: int) -> str:
    """Return the name of an image's patches: equal for equal content and limit."""
    return hashlib.sha256(f"{most_tokens} ".encode() + data).hexdigest()


class ImageProcessor:
    """A model directory's processor, by Pillow on every machine, so that all see the same pixels.

    It keeps the patches of recent images, by the hash of their content.
    """

    def __init__(self, folder: str | Path, cache_bytes: int = 1 << 30) -> None:
        """Raises ValueError if the directory has no image processor that can be opened."""
        from transformers import AutoImageProcessor

        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(Path(folder), backend="pil")
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            first_line = str(error).partition("\n")[0]
            raise ValueError(
                f"{folder}: its image processor cannot be opened ({type(error).__name__}:"
                f" {first_line}); copy preprocessor_config.json of the model into it"
            ) from error
        self._cache: PatchCache[Patches] = PatchCache(cache_bytes)

    @property
    def patches_per_token(self) -> int:
        return self._processor.merge_size**2

    @property
    def pixels_per_token(self) -> int:
        return (self._processor.patch_size * self._processor.merge_size) ** 2

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest image that the processor's own settings allow."""
        return self._processor.size["longest_edge"] // self.pixels_per_token

    @property
    def least_tokens(self) -> int:
        """Tokens that an image may not be shrunk below."""
        return max(1, -(-self._processor.size["shortest_edge"] // self.pixels_per_token))

    def num_tokens(self, size: ImageSize, most_tokens: int | None = None) -> int:
        """Return the tokens that an image of this size takes; it is shrunk to `most_tokens`."""
        limits = {"max_pixels": self._longest(most_tokens)}
        num_patches = self._processor.get_number_of_image_patches(size.height, size.width, limits)
        return num_patches // self.patches_per_token

    def patches(self, image: EncodedImage, most_tokens: int | None = None) -> Patches:
        """Return the patches of an image, shrunk to `most_tokens` tokens.

        Raises BadImage if its data are damaged.
        """
        key = (hashlib.sha256(image.data).digest(), self._longest(most_tokens))
        found = self._cache.get(key)
        if found is None:
            found = self._process(image, most_tokens)
            self._cache.put(key, found, found.num_bytes)
        return found

    def patches_of(self, image: PromptImage) -> Patches:
        """Return the patches of a prompt's image; see `patches`."""
        patches = self.patches(EncodedImage(image.data, image.where), image.most_tokens)
        num_tokens = len(patches.pixels_PD) // self.patches_per_token
        assert num_tokens == image.num_tokens, (image, num_tokens)
        return patches

    def _process(self, image: EncodedImage, most_tokens: int | None) -> Patches:
        size = {**self._sizes(), "longest_edge": self._longest(most_tokens)}
        made = self._processor(images=[decode(image)], size=size, return_tensors="pt")
        frames, height, width = made["image_grid_thw"][0].tolist()
        return Patches(made["pixel_values"].to(torch.float32), (frames, height, width))

    def _longest(self, most_tokens: int | None) -> int:
        """Return the most pixels of an image that takes at most `most_tokens` tokens."""
        if most_tokens is None or most_tokens >= self.most_tokens:
            return self._processor.size["longest_edge"]
        return most_tokens * self.pixels_per_token

    def _sizes(self) -> dict[str, int]:
        size = self._processor.size
        return {"shortest_edge": size["shortest_edge"], "longest_edge": size["longest_edge"]}
