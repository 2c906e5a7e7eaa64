"""Turns images and frames of videos into patches with the model directory's image processor.

Engines get these patches, too: torchvision's resizing, which SGLang would use on a GPU, gives other
pixels than Pillow's (docs/vision.md).

Kimi-VL's own processor is code of its checkpoint, so its steps are done here:

    131 x 90 pixels --> shrunk if they have too many patches --> black below and to the right, up to
    140 x 112 --> patches of 14 x 14, row by row; 2 x 2 of them make a token

Source: image_processing_kimi_vl.py of moonshotai/Kimi-VL-A3B-Instruct.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image

from mcore_rl.data.images.batch import PatchCache
from mcore_rl.data.images.decode import ImageSize, decode
from mcore_rl.data.images.encoded import EncodedImage
from mcore_rl.data.images.video_rule import VideoRule, read_video_rule
from mcore_rl.types import Clip, Patches, PromptImage

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
        return self._tokens(self._shrink(size, most_tokens))

    def make(self, image: Image.Image, most_tokens: int | None) -> Patches:
        """Return the patches of an RGB image, shrunk to `most_tokens` tokens."""
        shrunk = self._shrink(ImageSize(*image.size), most_tokens)
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

    def _shrink(self, size: ImageSize, most_tokens: int | None) -> ImageSize:
        """Return the size before padding."""
        if most_tokens is None or most_tokens >= self.most_tokens:
            return self._limit_patches(size, self._most_patches)
        low = 1
        high = most_tokens * self.merge**2
        if self._tokens(self._limit_patches(size, high)) <= most_tokens:
            return self._limit_patches(size, high)
        # Padding adds patches: find the largest number that leaves room for them.
        while high - low > 1:
            middle = (low + high) // 2
            if self._tokens(self._limit_patches(size, middle)) <= most_tokens:
                low = middle
            else:
                high = middle
        return self._limit_patches(size, low)

    def _limit_patches(self, size: ImageSize, num_patches: int) -> ImageSize:
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


def digest_of(data: bytes, most_tokens: int) -> str:
    """Return the name of an image's patches: equal for equal content and limit."""
    return hashlib.sha256(f"{most_tokens} ".encode() + data).hexdigest()


def digest_of_clip(first: bytes, clip: Clip) -> str:
    """Return the name of a clip's patches: equal for equal frames, size and interval."""
    found = hashlib.sha256(f"clip {clip.width} {clip.height} {clip.interval!r} ".encode())
    for frame in (first, *clip.frames):
        found.update(hashlib.sha256(frame).digest())
    return found.hexdigest()


class PatchRule(Protocol):
    """Makes the patches of a family of models.

    patch         pixels along a side of a patch
    merge         patches along height and along width that become one token
    most_tokens   tokens of the largest image that its own settings allow
    least_tokens  tokens that an image may not be shrunk below
    video         how the model reads videos; None: it does not
    """

    @property
    def video(self) -> VideoRule | None: ...
    @property
    def patch(self) -> int: ...
    @property
    def merge(self) -> int: ...
    @property
    def most_tokens(self) -> int: ...
    @property
    def least_tokens(self) -> int: ...

    def num_tokens(self, size: ImageSize, most_tokens: int | None) -> int:
        """Return the tokens that an image of this size takes; it is shrunk to `most_tokens`."""
        ...

    def make(self, image: Image.Image, most_tokens: int | None) -> Patches:
        """Return the patches of an RGB image, shrunk to `most_tokens` tokens."""
        ...


class TransformersPatches:
    """A processor of transformers whose size is given in pixels, by Pillow."""

    def __init__(self, processor: Any, folder: Path) -> None:
        """Raises ValueError as `read_video_rule` does for the directory."""
        self._processor = processor
        self.patch: int = processor.patch_size
        self.merge: int = processor.merge_size
        self._depth: int = processor.temporal_patch_size
        own = {
            "patch_size": self.patch,
            "merge_size": self.merge,
            "temporal_patch_size": self._depth,
            "image_mean": list(processor.image_mean),
            "image_std": list(processor.image_std),
        }
        self.video = read_video_rule(folder, self.patch * self.merge, self._depth, own)

    @property
    def most_tokens(self) -> int:
        return self._processor.size["longest_edge"] // self._pixels_per_token

    @property
    def least_tokens(self) -> int:
        return max(1, -(-self._processor.size["shortest_edge"] // self._pixels_per_token))

    def num_tokens(self, size: ImageSize, most_tokens: int | None) -> int:
        limits = {"max_pixels": self._longest(most_tokens)}
        num_patches = self._processor.get_number_of_image_patches(size.height, size.width, limits)
        return num_patches // self.merge**2

    def make(self, image: Image.Image, most_tokens: int | None) -> Patches:
        shortest = self._processor.size["shortest_edge"]
        size = {"shortest_edge": shortest, "longest_edge": self._longest(most_tokens)}
        made = self._processor(images=[image], size=size, return_tensors="pt")
        frames, height, width = made["image_grid_thw"][0].tolist()
        return Patches(made["pixel_values"].to(torch.float32), (frames, height, width))

    def make_clip(self, frames: Sequence[Image.Image], clip: Clip) -> Patches:
        """Return the patches of a clip, whose last frame is repeated to fill them.

        The processor repeats an image along the time of its patches; each frame fills its place.
        """
        size = (clip.width, clip.height)
        resized = [frame.resize(size, self._processor.resample) for frame in frames]
        resized += [resized[-1]] * (-len(resized) % self._depth)
        made = self._processor(images=resized, do_resize=False, return_tensors="pt")
        _, rows, columns = made["image_grid_thw"][0].tolist()
        pixels = made["pixel_values"].to(torch.float32)
        shape = (rows * columns, -1, self._depth, self.patch**2)
        parts = [each.reshape(shape) for each in pixels.split(rows * columns)]
        patches = [
            torch.stack([parts[first + k][:, :, k] for k in range(self._depth)], dim=2)
            for first in range(0, len(parts), self._depth)
        ]
        pixels_PD = torch.cat(patches).flatten(1)
        return Patches(pixels_PD, (len(patches), rows, columns), clip.interval)

    @property
    def _pixels_per_token(self) -> int:
        return (self.patch * self.merge) ** 2

    def _longest(self, most_tokens: int | None) -> int:
        """Return the most pixels of an image that takes at most `most_tokens` tokens."""
        if most_tokens is None or most_tokens >= self.most_tokens:
            return self._processor.size["longest_edge"]
        return most_tokens * self._pixels_per_token


class ImageProcessor:
    """A model directory's processor, by Pillow on every machine, so that all see the same pixels.

    It keeps the patches of recent images, by the hash of their content.
    """

    def __init__(self, folder: str | Path, cache_bytes: int = 1 << 30) -> None:
        """Raises ValueError if the directory has no image processor that can be opened."""
        self._rule = open_rule(Path(folder))
        self._cache: PatchCache[Patches] = PatchCache(cache_bytes)

    @property
    def video(self) -> VideoRule | None:
        """How the model reads videos; None: it does not."""
        return self._rule.video

    @property
    def patches_per_token(self) -> int:
        return self._rule.merge**2

    @property
    def pixels_per_token(self) -> int:
        return (self._rule.patch * self._rule.merge) ** 2

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest image that the processor's own settings allow."""
        return self._rule.most_tokens

    @property
    def least_tokens(self) -> int:
        """Tokens that an image may not be shrunk below."""
        return self._rule.least_tokens

    def num_tokens(self, size: ImageSize, most_tokens: int | None = None) -> int:
        """Return the tokens that an image of this size takes; it is shrunk to `most_tokens`."""
        return self._rule.num_tokens(size, most_tokens)

    def patches(self, image: EncodedImage, most_tokens: int | None = None) -> Patches:
        """Return the patches of an image, shrunk to `most_tokens` tokens.

        Raises BadImageError if its data are damaged.
        """
        limit = self.most_tokens if most_tokens is None else min(most_tokens, self.most_tokens)
        key = (hashlib.sha256(image.data).digest(), limit)
        found = self._cache.get(key)
        if found is None:
            found = self._rule.make(decode(image), most_tokens)
            self._cache.put(key, found, found.num_bytes)
        return found

    def patches_of(self, image: PromptImage) -> Patches:
        """Return the patches of a prompt's image or piece of a video; see `patches`."""
        first = EncodedImage(image.data, image.where)
        if image.clip is None:
            patches = self.patches(first, image.most_tokens)
        else:
            assert isinstance(self._rule, TransformersPatches), image
            others = [EncodedImage(data, image.where) for data in image.clip.frames]
            patches = self._rule.make_clip([decode(f) for f in (first, *others)], image.clip)
        num_tokens = len(patches.pixels_PD) // self.patches_per_token
        assert num_tokens == image.num_tokens, (image, num_tokens)
        return patches


def open_rule(folder: Path) -> PatchRule:
    """Return how a model directory makes patches.

    Raises ValueError if the directory has no image processor that can be opened.
    """
    from transformers import AutoImageProcessor

    try:
        settings = read_settings(folder)
        if settings is not None:
            return KimiVlPatches(settings)
        opened = AutoImageProcessor.from_pretrained(folder, backend="pil")
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        first_line = str(error).partition("\n")[0]
        raise ValueError(
            f"{folder}: its image processor cannot be opened ({type(error).__name__}:"
            f" {first_line}); copy preprocessor_config.json of the model into it"
        ) from error
    return TransformersPatches(opened, folder)
