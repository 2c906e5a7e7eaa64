"""Turns images into patches as Kimi-VL's authors do, whose own processor is code of a checkpoint.

    131 x 90 pixels --> shrunk if they have too many patches --> black below and to the right, up to
    140 x 112 --> patches of 14 x 14, row by row; 2 x 2 of them make a token

Source: image_processing_kimi_vl.py of moonshotai/Kimi-VL-A3B-Instruct.
"""

import json
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mcore_rl.data.images.decode import ImageSize
from mcore_rl.types import Patches

NAME = "KimiVLImageProcessor"
LONGEST_SIDE = 510
"""Patches of a side. MoonViT turns no more than 512, and their processor refuses what has more than
511 after padding; a longer side is shrunk here."""


def read_settings(folder: Path) -> dict[str, Any] | None:
    """Return preprocessor_config.json if it is Kimi-VL's, or None."""
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        return None
    settings = json.loads(path.read_text())
    named = (settings.get("auto_map") or {}).get("AutoImageProcessor", "")
    kinds = (settings.get("image_processor_type"), named.rpartition(".")[2])
    return settings if NAME in kinds else None


class KimiVlPatches:
    """The processor of a directory with Kimi-VL's preprocessor_config.json."""

    video = None
    """Patches have no frames."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Raises ValueError for a setting that is not supported."""
        kernel = settings.get("merge_kernel_size", [2, 2])
        if len(kernel) != 2 or kernel[0] != kernel[1]:
            raise ValueError(
                f"merge_kernel_size={kernel} in preprocessor_config.json: only two equal numbers"
                " are supported"
            )
        if not settings.get("pad_input", False):
            raise ValueError(
                "pad_input=false in preprocessor_config.json: images would be cropped, which is not"
                " supported; set pad_input=true as the published models have it"
            )
        self.merge: int = kernel[0]
        self.patch: int = settings.get("patch_size", 14)
        self._most_patches: int = settings.get("in_token_limit", 4096)
        self._mean_3 = np.array(settings["image_mean"], dtype=np.float32)
        self._std_3 = np.array(settings["image_std"], dtype=np.float32)

    @property
    def most_tokens(self) -> int:
        """Tokens that the processor's own settings allow; padding may add some."""
        return self._most_patches // self.merge**2

    @property
    def least_tokens(self) -> int:
        return 1

    def num_tokens(self, size: ImageSize, most_tokens: int | None) -> int:
        """Return the tokens of an image that is shrunk to `most_tokens`, if it can be."""
        return self._tokens(self._shrunk(size, most_tokens))

    def make(self, image: Image.Image, most_tokens: int | None) -> Patches:
        """Return the patches of an RGB image, shrunk to `most_tokens` tokens."""
        shrunk = self._shrunk(ImageSize(*image.size), most_tokens)
        if image.size != (shrunk.width, shrunk.height):
            resized = (shrunk.width, shrunk.height)
            image = image.resize(resized, Image.Resampling.BICUBIC)
        rows, columns = self._grid(shrunk)
        padded_HWC = np.zeros((rows * self.patch, columns * self.patch, 3), dtype=np.uint8)
        padded_HWC[: shrunk.height, : shrunk.width] = np.asarray(image)
        pixels_HWC = (padded_HWC.astype(np.float32) / 255 - self._mean_3) / self._std_3
        cut = pixels_HWC.reshape(rows, self.patch, columns, self.patch, 3)
        pixels_PD = cut.transpose(0, 2, 4, 1, 3).reshape(rows * columns, -1)
        return Patches(torch.from_numpy(np.ascontiguousarray(pixels_PD)), (1, rows, columns))

    def _shrunk(self, size: ImageSize, most_tokens: int | None) -> ImageSize:
        """Return the size before padding."""
        if most_tokens is None or most_tokens >= self.most_tokens:
            return self._at_most(size, self._most_patches)
        low = 1
        high = most_tokens * self.merge**2
        if self._tokens(self._at_most(size, high)) <= most_tokens:
            return self._at_most(size, high)
        # Padding adds patches: find the largest number that leaves room for them.
        while high - low > 1:
            middle = (low + high) // 2
            if self._tokens(self._at_most(size, middle)) <= most_tokens:
                low = middle
            else:
                high = middle
        return self._at_most(size, low)

    def _at_most(self, size: ImageSize, num_patches: int) -> ImageSize:
        """Shrink an image that has more than so many whole patches, and keep its proportions."""
        longest = max(size.width, size.height)
        scale = min(1.0, LONGEST_SIDE * self.patch / longest)
        whole = (size.width // self.patch) * (size.height // self.patch)
        if whole > num_patches:
            scale = min(scale, sqrt(num_patches / whole))
        if scale == 1.0:
            return size
        return ImageSize(max(1, int(size.width * scale)), max(1, int(size.height * scale)))

    def _tokens(self, size: ImageSize) -> int:
        rows, columns = self._grid(size)
        return rows * columns // self.merge**2

    def _grid(self, size: ImageSize) -> tuple[int, int]:
        """Return the patches along height and width, a multiple of `merge`."""
        side = self.patch * self.merge
        return (-(-size.height // side) * self.merge, -(-size.width // side) * self.merge)
