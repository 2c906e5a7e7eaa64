"""Equal images of a micro-batch go through the tower once, to the same embeddings and gradients."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mcore_rl.config import ParallelConfig, TrainConfig
from mcore_rl.data.images.batch import join_patches, split_images
from mcore_rl.data.images.places import ImageTokens
from mcore_rl.train.transformer_config import make_transformer_config
from mcore_rl.train.vision.rank_images import distinct_images, make_rank_images
from mcore_rl.train.vision.tower import embed_images, make_tower
from mcore_rl.types import Images, Patches, TrainBatch
from tests.support.tiny_vision import PLACEHOLDER, TEXT, VISION, make_vision_batches

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    **TEXT,
    "rms_norm_eps": 1e-6,
    "vision_config": VISION,
    "image_token_id": PLACEHOLDER,
}
TOKENS = ImageTokens(PLACEHOLDER, 2)


def kinds() -> list[Patches]:
    """Return images of several sizes."""
    batches = [batch.images for batch in make_vision_batches() if batch.images is not None]
    return [each for images in batches for own in split_images(images) for each in own]


def joined(names: Sequence[int]) -> Images:
    images = join_patches([[kinds()[name] for name in names]])
    assert images is not None
    return images


@given(st.lists(st.integers(0, 2), min_size=1, max_size=7))
def test_rows_are_those_of_the_same_image(names: list[int]) -> None:
    images = joined(names)
    nums_tokens = TOKENS.nums_tokens(images.grids_I3)
    found, rows_R = distinct_images(images, nums_tokens)
    assert len(found.grids_I3) == len(set(names))
    assert torch.equal(_by_token(found)[rows_R], _by_token(images))


def _by_token(images: Images) -> Tensor:
    """Return the four patches of each token's piece of an image."""
    return images.pixels_PD.reshape(-1, 4, images.pixels_PD.shape[1])


def test_images_of_another_grid_are_other_images() -> None:
    pixels_PD = torch.zeros(8, 3)
    patches = [Patches(pixels_PD, (1, 2, 4)), Patches(pixels_PD, (1, 4, 2))]
    images = join_patches([patches])
    assert images is not None
    found, rows_R = distinct_images(images, [2, 2])
    assert found is images and rows_R.tolist() == [0, 1, 2, 3]


def test_images_without_pixels_stay_as_they_are() -> None:
    images = joined([0, 0])
    empty = Images(images.pixels_PD.to("meta"), images.grids_I3, images.nums_N)
    found, rows_R = distinct_images(empty, TOKENS.nums_tokens(images.grids_I3))
    assert found is empty and torch.equal(rows_R, torch.arange(len(rows_R)))


def gradients(names: Sequence[int], *, distinct: bool) -> tuple[Tensor, list[Tensor]]:
    """Return the embeddings of all images, and the tower's gradients of a sum over them."""
    torch.manual_seed(0)
    config = make_transformer_config(CONFIG, ParallelConfig(), torch.float32, TrainConfig())
    tower = make_tower(config, CONFIG)
    for parameter in tower.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    images = joined(names)
    rows_R = torch.arange(sum(TOKENS.nums_tokens(images.grids_I3)))
    if distinct:
        images, rows_R = distinct_images(images, TOKENS.nums_tokens(images.grids_I3))
    embeddings_RH = embed_images(tower, images).embeddings_RH[rows_R]
    weights_RH = torch.randn(embeddings_RH.shape, generator=torch.Generator().manual_seed(1))
    (embeddings_RH * weights_RH).sum().backward()
    grads = [p.grad for p in tower.parameters() if p.grad is not None]
    return embeddings_RH.detach(), grads


def test_gradients_are_those_of_all_images() -> None:
    names = [0, 1, 0, 0, 2, 1]
    wanted_RH, wanted = gradients(names, distinct=False)
    found_RH, found = gradients(names, distinct=True)
    torch.testing.assert_close(found_RH, wanted_RH, rtol=1e-5, atol=1e-6)
    assert len(found) == len(wanted) > 10
    for ours, theirs in zip(found, wanted, strict=True):
        scale = float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * max(scale, 1.0))


@pytest.mark.parametrize("num_samples", [1, 4])
def test_samples_of_a_prompt_share_the_tower_of_their_rank(num_samples: int) -> None:
    image = kinds()[0]
    [num_tokens] = TOKENS.nums_tokens(torch.tensor([image.grid]))
    ids = [1, *[PLACEHOLDER] * num_tokens, 2]
    batch = TrainBatch(
        token_ids_T=torch.tensor(ids * num_samples),
        loss_mask_T=torch.zeros(len(ids) * num_samples, dtype=torch.bool),
        lens_N=(len(ids),) * num_samples,
        images=join_patches([[image]] * num_samples),
    )
    all_T = torch.arange(len(batch.token_ids_T))
    vision = make_rank_images(batch, batch.lens_N, all_T, TOKENS)
    assert vision.images is not None and len(vision.images.grids_I3) == 1
    one = [-1, *range(num_tokens), -1]
    assert vision.rows_T.tolist() == one * num_samples
