"""Pixels are those of the model directory's own processor, and each image is processed once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mcore_rl.data.images.decode import decode, read_size
from mcore_rl.data.images.encoded import EncodedImage
from mcore_rl.data.images.processor import ImageProcessor, digest_of_clip
from mcore_rl.types import Clip, PromptImage
from tests.support.odd_images import PROCESSOR, encode, good_images, noise, write_processor


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_processor(tmp_path)


def transformers_patches(folder: Path, image: Image.Image, **options: Any) -> Any:
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(folder)(image, return_tensors="pt", **options)


@pytest.mark.parametrize("name", good_images())
def test_pixels_are_those_of_the_models_processor(folder: Path, name: str) -> None:
    processor = ImageProcessor(folder)
    image = EncodedImage(good_images()[name], name)
    patches = processor.patches(image)
    wanted = transformers_patches(folder, decode(image))
    assert torch.equal(patches.pixels_PD, wanted["pixel_values"])
    assert list(patches.grid) == wanted["image_grid_thw"][0].tolist()
    num_tokens = processor.num_tokens(read_size(image, 1 << 20))
    assert num_tokens == len(patches.pixels_PD) // processor.patches_per_token


@pytest.mark.parametrize("limit", [4, 7, 20, 39])
def test_a_large_image_is_shrunk_to_the_limit(folder: Path, limit: int) -> None:
    processor = ImageProcessor(folder)
    image = EncodedImage(encode(noise(200, 300)), "large")
    size = read_size(image, 1 << 20)
    patches = processor.patches(image, limit)
    num_tokens = len(patches.pixels_PD) // processor.patches_per_token
    assert num_tokens == processor.num_tokens(size, limit) <= limit
    assert limit - num_tokens <= limit // 2
    assert processor.num_tokens(size, 1000) == processor.num_tokens(size) <= processor.most_tokens


def video_pixels(folder: Path, frames: list[Image.Image]) -> torch.Tensor:
    """Return what transformers' video processor cuts resized frames into."""
    from transformers import AutoImageProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    images: Any = AutoImageProcessor.from_pretrained(folder)
    normal = [
        images.normalize(images.rescale(np.asarray(frame).transpose(2, 0, 1), 1 / 255), *MEANS)
        for frame in frames
    ]
    videos = torch.from_numpy(np.stack(normal))[None].float()
    pixels, *_ = Qwen3VLVideoProcessor.patchify(images, videos, 4, 2, 2)
    return pixels[0]


MEANS = (PROCESSOR["image_mean"], PROCESSOR["image_std"])


@pytest.mark.parametrize("num_frames", [1, 2, 5, 6])
def test_pixels_of_a_clip_are_those_of_the_video_processor(folder: Path, num_frames: int) -> None:
    frames = [noise(37, 21, seed=seed) for seed in range(num_frames)]
    data = [encode(frame) for frame in frames]
    clip = Clip(tuple(data[1:]), height=24, width=40, interval=0.5)
    num_patches = -(-num_frames // 2)
    image = PromptImage("d", data[0], num_patches * 15, 99, "row 0", clip)
    patches = ImageProcessor(folder).patches_of(image)
    resized = [frame.resize((40, 24), Image.Resampling.BICUBIC) for frame in frames]
    assert torch.equal(patches.pixels_PD, video_pixels(folder, resized))
    assert (patches.grid, patches.interval) == ((num_patches, 6, 10), 0.5)


def test_a_clip_is_named_by_frames_size_and_interval() -> None:
    clip = Clip((b"b", b"c"), 8, 8, 1.0)
    names = {
        digest_of_clip(b"a", clip),
        digest_of_clip(b"ab", replace(clip, frames=(b"c",))),
        digest_of_clip(b"a", replace(clip, frames=(b"bc",))),
        digest_of_clip(b"a", replace(clip, height=16)),
        digest_of_clip(b"a", replace(clip, width=16)),
        digest_of_clip(b"a", replace(clip, interval=2.0)),
    }
    assert len(names) == 6


def test_the_same_content_is_processed_once(folder: Path) -> None:
    processor = ImageProcessor(folder)
    data = encode(noise(40, 30))
    first = processor.patches(EncodedImage(data, "row 0"))
    assert processor.patches(EncodedImage(data, "row 7")) is first
    assert processor.patches(EncodedImage(data, "row 7"), 5) is not first
    forgetful = ImageProcessor(folder, cache_bytes=0)
    one, two = (forgetful.patches(EncodedImage(data, "row 0")) for _ in range(2))
    assert one is not two
    assert torch.equal(one.pixels_PD, two.pixels_PD)


def test_a_directory_without_a_processor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"its image processor cannot be opened .*copy"):
        ImageProcessor(tmp_path)
