"""Context-parallel ranks together hold each image token once, at its row of the micro-batch."""

import pytest
import torch

from mcore_rl.data.images.places import ImageTokens
from mcore_rl.train.packing import make_rank_batch, pad_lens
from mcore_rl.train.vision.rank_images import RankImages, make_rank_images
from tests.support.tiny_vision import PLACEHOLDER, make_vision_batches

TOKENS = ImageTokens(PLACEHOLDER, 2)


@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_ranks_hold_every_row_once(cp: int, tp: int) -> None:
    for batch in make_vision_batches():
        parts = [make_rank_batch(batch, rank, cp, tp, image_tokens=TOKENS) for rank in range(cp)]
        visions = [vision_of(part) for part in parts]
        rows_T = torch.cat([vision.rows_T for vision in visions])
        sources_T = torch.cat([part.sources_T for part in parts])
        is_image_T = rows_T >= 0
        places = sources_T[is_image_T][rows_T[is_image_T].argsort()]
        assert torch.equal(places, (batch.token_ids_T == PLACEHOLDER).nonzero()[:, 0])
        padded_N = pad_lens(batch.lens_N, cp, tp)
        for vision in visions:
            assert vision.rotary_3P.shape == (3, sum(padded_N))
            assert (vision.images is None) == (batch.images is None)


def test_text_has_three_equal_positions() -> None:
    [batch] = [batch for batch in make_vision_batches() if batch.images is None]
    vision = make_rank_images(batch, batch.lens_N, torch.arange(14), TOKENS)
    wanted_T = torch.cat([torch.arange(length) for length in batch.lens_N])
    assert torch.equal(vision.rotary_3P, wanted_T.expand(3, -1))
    assert (vision.rows_T == -1).all()


def test_only_the_first_stage_gets_pixels() -> None:
    batch = make_vision_batches()[0]
    vision = make_rank_images(batch, batch.lens_N, torch.arange(len(batch.token_ids_T)), TOKENS)
    assert vision.on_device(images=False).images is None
    placed = vision.on_device(images=True).images
    assert placed is not None and batch.images is not None
    assert torch.equal(placed.pixels_PD, batch.images.pixels_PD)


def test_a_model_of_text_refuses_images() -> None:
    with pytest.raises(ValueError, match="3 images, but the model sees only text"):
        make_rank_batch(make_vision_batches()[0], 0, 1, 1)


def vision_of(part: object) -> RankImages:
    vision = getattr(part, "vision", None)
    assert isinstance(vision, RankImages)
    return vision
