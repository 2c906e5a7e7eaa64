"""Makes the patches of Kimi-VL and Kimi-K2.5, whose processors are code of their checkpoints.

    131 x 90 pixels --> shrunk if they have too many patches --> black below and to the right, up to
    140 x 112 --> patches of 14 x 14, row by row; 2 x 2 of them make a token

Source: image_processing_kimi_vl.py of moonshotai/Kimi-VL-A3B-Instruct, media_utils.py of
moonshotai/Kimi-K2.5.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mcore_rl.data.images.decode import ImageSize
from mcore_rl.types import Patches

FILE = "preprocessor_config.json"
KIMI_VL = "KimiVLImageProcessor"
KIMI_K25 = "media_proc_cfg"
"""Key of the settings in the file of Kimi-K2.5."""
KIMI_VL_SIDE = 510
"""Patches of a side. MoonViT turns no more than 512, and Kimi-VL's processor refuses what has more
than 511 after padding; a longer side is shrunk here."""
KIMI_K25_SIDE = 512
"""The same by Kimi-K2.5's processor, which shrinks longer sides itself."""


@dataclass(frozen=True)
class PatchSettings:
    """The settings of a processor.

    patch           pixels along a side of a patch
    merge           patches along height and along width that become one token
    most_patches    whole patches of the largest image; padding may add some
    longest_side    patches of the longest side, with padding
    mean, std       of red, green and blue, as parts of the largest value
    """

    patch: int
    merge: int
    most_patches: int
    longest_side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def read_settings(folder: Path) -> PatchSettings | None:
    """Return the settings of a directory with a processor of Kimi-VL or Kimi-K2.5, or None.

    Raises ValueError for a setting that is not supported.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    settings = json.loads(path.read_text())
    named = (settings.get("auto_map") or {}).get("AutoImageProcessor", "")
    if KIMI_VL in (settings.get("image_processor_type"), named.rpartition(".")[2]):
        return read_kimi_vl(settings)
    if KIMI_K25 not in settings:
        return None
    if not isinstance(settings[KIMI_K25], Mapping):
        raise ValueError(f"{KIMI_K25}={settings[KIMI_K25]!r} in {FILE}: it should hold settings")
    return read_kimi_k25(settings[KIMI_K25])


def read_kimi_vl(settings: Mapping[str, Any]) -> PatchSettings:
    """Return the settings of Kimi-VL's file. Raises ValueError as `read_settings` does."""
    if not settings.get("pad_input", False):
        raise ValueError(
            f"pad_input=false in {FILE}: images would be cropped, which is not supported; set"
            " pad_input=true as the published models have it"
        )
    return _make_settings(settings, _read_count(settings, "in_token_limit", 4096), KIMI_VL_SIDE)


def read_kimi_k25(settings: Mapping[str, Any]) -> PatchSettings:
    """Return the settings of Kimi-K2.5's file, which lie under `media_proc_cfg` in it.

    Raises ValueError as `read_settings` does.
    """
    if settings.get("fixed_output_tokens") is not None:
        raise ValueError(
            f"fixed_output_tokens={settings['fixed_output_tokens']} in {FILE} is not supported: set"
            " it to null as the published models have it"
        )
    side = _read_count(settings, "patch_limit_on_one_side", KIMI_K25_SIDE)
    if not 1 < side <= KIMI_K25_SIDE:
        raise ValueError(
            f"patch_limit_on_one_side={side} in {FILE}: the tower turns patches of sides of 2 to"
            f" {KIMI_K25_SIDE}"
        )
    return _make_settings(settings, _read_count(settings, "in_patch_limit", 16384), side)


def _make_settings(
    settings: Mapping[str, Any], most_patches: int, longest_side: int
) -> PatchSettings:
    kernel = settings.get("merge_kernel_size", 2)
    sides = kernel if isinstance(kernel, list) else [kernel, kernel]
    if len(sides) != 2 or sides[0] != sides[1]:
        raise ValueError(
            f"merge_kernel_size={kernel} in {FILE}: only two equal numbers are supported"
        )
    merge = sides[0]
    return PatchSettings(
        patch=_read_count(settings, "patch_size", 14),
        merge=merge,
        most_patches=most_patches,
        longest_side=longest_side // merge * merge,
        mean=_read_colors(settings, "image_mean", least=0.0),
        std=_read_colors(settings, "image_std", least=1e-6),
    )


def _read_count(settings: Mapping[str, Any], key: str, default: int) -> int:
    value = settings.get(key, default)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}={value!r} in {FILE}: it should be a number, at least 1")
    return value


def _read_colors(settings: Mapping[str, Any], key: str, least: float) -> tuple[float, ...]:
    values = settings.get(key)
    found = tuple(values) if isinstance(values, list) else ()
    are_numbers = all(isinstance(value, int | float) and value >= least for value in found)
    if len(found) != len("RGB") or not are_numbers:
        raise ValueError(f"{key}={values!r} in {FILE}: it should be 3 numbers, at least {least:g}")
    return found


class MoonVitPatches:
    """The rule of a directory whose settings `read_settings` returns."""

    video = None
    """Patches have no frames."""

    def __init__(self, settings: PatchSettings) -> None:
        self.merge = settings.merge
        self.patch = settings.patch
        self._most_patches = settings.most_patches
        self._longest_side = settings.longest_side
        self._mean_3 = np.array(settings.mean, dtype=np.float32)
        self._std_3 = np.array(settings.std, dtype=np.float32)

    @property
    def most_tokens(self) -> int:
        """Tokens that the processor's own settings allow; padding may add some."""
        return self._most_patches // self.merge**2

    @property
    def least_tokens(self) -> int:
        return 1

    def num_tokens(self, size: ImageSize, most_tokens: int | None) -> int:
        """Return the tokens of an image that is shrunk to `most_tokens`, if it can be."""
        return self._count_tokens(self._shrink(size, most_tokens))

    def make(self, image: Image.Image, most_tokens: int | None) -> Patches:
        """Return the patches of an RGB image, shrunk to `most_tokens` tokens."""
        shrunk = self._shrink(ImageSize(*image.size), most_tokens)
        if image.size != (shrunk.width, shrunk.height):
            resized = (shrunk.width, shrunk.height)
            image = image.resize(resized, Image.Resampling.BICUBIC)
        rows, columns = self._count_sides(shrunk)
        padded_HWC = np.zeros((rows * self.patch, columns * self.patch, 3), dtype=np.uint8)
        padded_HWC[: shrunk.height, : shrunk.width] = np.asarray(image)
        pixels_HWC = (padded_HWC.astype(np.float32) / 255 - self._mean_3) / self._std_3
        cut = pixels_HWC.reshape(rows, self.patch, columns, self.patch, 3)
        pixels_PD = cut.transpose(0, 2, 4, 1, 3).reshape(rows * columns, -1)
        return Patches(torch.from_numpy(np.ascontiguousarray(pixels_PD)), (1, rows, columns))

    def _shrink(self, size: ImageSize, most_tokens: int | None) -> ImageSize:
        """Return the size before padding."""
        if most_tokens is None or most_tokens >= self.most_tokens:
            return self._limit_patches(size, self._most_patches)
        low = 1
        high = most_tokens * self.merge**2
        if self._count_tokens(self._limit_patches(size, high)) <= most_tokens:
            return self._limit_patches(size, high)
        # Padding adds patches: find the largest number that leaves room for them.
        while high - low > 1:
            middle = (low + high) // 2
            if self._count_tokens(self._limit_patches(size, middle)) <= most_tokens:
                low = middle
            else:
                high = middle
        return self._limit_patches(size, low)

    def _limit_patches(self, size: ImageSize, num_patches: int) -> ImageSize:
        """Shrink an image that has more than so many whole patches, and keep its proportions.

        A side that is shorter than a patch counts as one.
        """
        longest = max(size.width, size.height)
        scale = min(1.0, self._longest_side * self.patch / longest)
        whole = max(1, size.width // self.patch) * max(1, size.height // self.patch)
        if whole > num_patches:
            scale = min(scale, sqrt(num_patches / whole))
        if scale == 1.0:
            return size
        return ImageSize(max(1, int(size.width * scale)), max(1, int(size.height * scale)))

    def _count_tokens(self, size: ImageSize) -> int:
        rows, columns = self._count_sides(size)
        return rows * columns // self.merge**2

    def _count_sides(self, size: ImageSize) -> tuple[int, int]:
        """Return the patches along height and width, a multiple of `merge`."""
        side = self.patch * self.merge
        return (-(-size.height // side) * self.merge, -(-size.width // side) * self.merge)
