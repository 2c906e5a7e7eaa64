"""Kimi's patches: sizes as transformers' Kimi-K2.5 has them, pixels as Pillow resizes them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mcore_rl.data.images.decode import ImageSize
from mcore_rl.data.images.moonvit_patches import (
    KIMI_VL_SIDE,
    MoonVitPatches,
    read_kimi_k25,
    read_kimi_vl,
    read_settings,
)
from mcore_rl.data.images.processor import ImageProcessor
from tests.support.odd_images import noise
from tests.support.tiny_kimi_vl import KIMI_K25_PROCESSOR, KIMI_VL_PROCESSOR

RULE = MoonVitPatches(read_kimi_vl(KIMI_VL_PROCESSOR))
SMALL = MoonVitPatches(read_kimi_vl({**KIMI_VL_PROCESSOR, "in_token_limit": 40}))
K25 = KIMI_K25_PROCESSOR["media_proc_cfg"]
SIDES = st.integers(1, 4000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "limits"),
    [
        (RULE, (4096, KIMI_VL_SIDE)),
        (MoonVitPatches(read_kimi_k25(K25)), (16384, 512)),
        (MoonVitPatches(read_kimi_k25({**K25, "in_patch_limit": 300})), (300, 512)),
    ],
    ids=["kimi_vl", "kimi_k25", "few_patches"],
)
def test_sizes_are_those_of_kimi_k25(rule: MoonVitPatches, limits: tuple[int, int]) -> None:
    generator = np.random.default_rng(0)
    sizes = generator.integers(1, 4000, (400, 2)).tolist()
    sizes += generator.integers(1, 40, (50, 2)).tolist()
    sizes += [[14 * 900, 28], [30, 9000], [896, 896], [3, 9000], [7168, 7168], [7169, 13]]
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.support.navit_sizes",
            json.dumps(sizes),
            *map(str, limits),
        ],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    padded = json.loads(process.stdout.splitlines()[-1])
    found = [rule.num_tokens(ImageSize(*size), None) for size in sizes]
    assert found == [width * height // 28**2 for width, height in padded]
    num_shrunk = sum(size[0] > after[0] for size, after in zip(sizes, padded, strict=True))
    assert num_shrunk > 50, "hardly any picture is too large for the rule"


@given(SIDES, SIDES, st.integers(1, 1024), st.integers(1, 1024))
def test_a_higher_limit_never_gives_fewer_tokens(
    width: int, height: int, first: int, second: int
) -> None:
    size = ImageSize(width, height)
    low, high = (RULE.num_tokens(size, limit) for limit in sorted((first, second)))
    assert low <= high


@given(st.integers(28, 2000), st.integers(28, 2000), st.integers(32, 600))
def test_a_limit_is_kept(width: int, height: int, limit: int) -> None:
    if max(width, height) <= 8 * min(width, height):
        assert RULE.num_tokens(ImageSize(width, height), limit) <= limit


def whole_picture(pixels_PD: torch.Tensor, grid: tuple[int, int, int]) -> np.ndarray:
    """Put patches together again, as bytes [height, width, 3]."""
    _, rows, columns = grid
    cut = pixels_PD.reshape(rows, columns, 3, 14, 14).permute(0, 3, 1, 4, 2)
    picture = cut.reshape(rows * 14, columns * 14, 3)
    return ((picture * 0.5 + 0.5) * 255).round().numpy().astype(np.uint8)


@pytest.mark.parametrize(("width", "height"), [(131, 90), (28, 56), (1, 1), (300, 17)])
def test_a_small_image_is_padded_with_black(width: int, height: int) -> None:
    image = noise(width, height)
    patches = RULE.make(image, None)
    found = whole_picture(patches.pixels_PD, patches.grid)
    assert found.shape == (-(-height // 28) * 28, -(-width // 28) * 28, 3)
    assert np.array_equal(found[:height, :width], np.asarray(image))
    assert not found[height:].any()
    assert not found[:, width:].any()


def test_a_large_image_is_shrunk_by_pillow() -> None:
    image = noise(200, 150)  # 14 x 10 whole patches, of which 40 are allowed
    scale = (40 / 140) ** 0.5
    width, height = int(200 * scale), int(150 * scale)
    patches = SMALL.make(image, None)
    found = whole_picture(patches.pixels_PD, patches.grid)
    wanted = image.resize((width, height), Image.Resampling.BICUBIC)
    assert np.array_equal(found[:height, :width], np.asarray(wanted))
    assert len(patches.pixels_PD) == 4 * SMALL.num_tokens(ImageSize(200, 150), None)


def test_a_side_that_is_too_long_is_shrunk() -> None:
    long = ImageSize(14 * 900, 28)
    assert RULE.num_tokens(long, None) <= KIMI_VL_SIDE // 2


def test_the_directory_says_whose_patches_they_are(tmp_path: Path) -> None:
    assert read_settings(tmp_path) is None
    path = tmp_path / "preprocessor_config.json"
    plain = {k: v for k, v in KIMI_VL_PROCESSOR.items() if k != "image_processor_type"}
    path.write_text(json.dumps(plain))
    assert read_settings(tmp_path) == read_kimi_vl(KIMI_VL_PROCESSOR)
    processor = ImageProcessor(tmp_path)
    assert (processor.most_tokens, processor.least_tokens) == (1024, 1)
    assert (processor.patches_per_token, processor.pixels_per_token) == (4, 784)
    path.write_text(json.dumps(KIMI_K25_PROCESSOR))
    assert read_settings(tmp_path) == read_kimi_k25(K25)
    assert ImageProcessor(tmp_path).most_tokens == 4096
    path.write_text(json.dumps({"image_processor_type": "Qwen2VLImageProcessor"}))
    assert read_settings(tmp_path) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pad_input": False}, "pad_input=false"),
        ({"merge_kernel_size": [2, 1]}, r"merge_kernel_size=\[2, 1\]"),
    ],
)
def test_unsupported_settings_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_kimi_vl({**KIMI_VL_PROCESSOR, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fixed_output_tokens": 64}, "fixed_output_tokens=64"),
        ({"patch_limit_on_one_side": 1024}, "patch_limit_on_one_side=1024"),
        ({"merge_kernel_size": [2, 1]}, r"merge_kernel_size=\[2, 1\]"),
        ({"in_patch_limit": 0}, "in_patch_limit=0"),
        ({"patch_limit_on_one_side": "512"}, "patch_limit_on_one_side='512'"),
        ({"image_std": [0, 0.5, 0.5]}, "image_std="),
        ({"image_mean": [0.5, 0.5]}, "image_mean=.* 3 numbers"),
    ],
)
def test_unsupported_settings_of_kimi_k25_are_refused(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_kimi_k25({**K25, **change})


def test_a_file_without_settings_is_refused(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"media_proc_cfg": null}')
    with pytest.raises(ValueError, match="media_proc_cfg=None"):
        ImageProcessor(tmp_path)
