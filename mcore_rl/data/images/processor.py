"""Turns images and frames of videos into patches with the model directory's image processor.

Engines get these patches, too: torchvision's resizing, which SGLang would use on a GPU, gives other
pixels than Pillow's (docs/vision.md).

The processors of Kimi-VL and Kimi-K2.5 are code of their checkpoints, so moonvit_patches.py has
their rule.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image

from mcore_rl.data.images.batch import PatchCache
from mcore_rl.data.images.decode import ImageSize, decode
from mcore_rl.data.images.encoded import EncodedImage
from mcore_rl.data.images.moonvit_patches import MoonVitPatches, read_settings
from mcore_rl.data.images.video_rule import VideoRule, read_video_rule
from mcore_rl.types import Clip, Patches, PromptImage


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

    settings = read_settings(folder)
    if settings is not None:
        return MoonVitPatches(settings)
    try:
        opened = AutoImageProcessor.from_pretrained(folder, backend="pil")
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        first_line = str(error).partition("\n")[0]
        raise ValueError(
            f"{folder}: its image processor cannot be opened ({type(error).__name__}:"
            f" {first_line}); copy preprocessor_config.json of the model into it"
        ) from error
    return TransformersPatches(opened, folder)
