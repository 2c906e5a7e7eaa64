"""A tower's activations by hand, and what recomputing and freezing it save."""

from dataclasses import replace

import pytest

from mcore_rl.config.recipe import load_recipe
from mcore_rl.planning.activations import (
    Pass,
    count_pixel_bytes,
    count_received_features,
    count_tower_activations,
)
from mcore_rl.planning.memory import predict_trainer
from mcore_rl.planning.recipe_models import PlannedRun
from mcore_rl.planning.resident_memory import NO_LINKS
from mcore_rl.weights.hf.config import ModelFacts

KIMI_VL = ModelFacts.read("recipes/model/kimi_vl_a3b").config
QWEN = ModelFacts.read("recipes/model/qwen2_5_vl_7b").config
QWEN3 = ModelFacts.read("recipes/model/qwen3_vl_8b").config
STEP = Pass(
    tokens=1000,
    tp=4,
    cp=2,
    etp=1,
    itemsize=2,
    recomputed=frozenset(),
    logprob_chunk=1000,
    expert_load=1.0,
)
BLOCK = 10 * 1280 + 4 * 3420
BYTES = 4 * 1000 * 2
"""One number for each patch of a micro-batch takes so many; a token has 4 patches."""


def test_every_block_keeps_its_numbers() -> None:
    found = count_tower_activations(QWEN, STEP, "all", in_flight=2)
    assert found == pytest.approx(BYTES * (2 * 32 * BLOCK + BLOCK))


def test_recomputed_blocks_keep_their_inputs() -> None:
    step = replace(STEP, recomputed=frozenset({"core_attn"}))
    found = count_tower_activations(QWEN, step, "all", in_flight=2)
    assert found == pytest.approx(BYTES * (2 * 32 * 1280 + BLOCK))


@pytest.mark.parametrize("vision", ["projector", "none"])
def test_frozen_blocks_keep_nothing(vision: str) -> None:
    found = count_tower_activations(QWEN, STEP, vision, in_flight=2)
    assert found == pytest.approx(BYTES * BLOCK)


def test_pixels_are_those_of_the_processor() -> None:
    assert count_pixel_bytes(QWEN, 9) == 4 * 9 * 3 * 2 * 14 * 14 * 4
    assert count_pixel_bytes(QWEN3, 9) == 4 * 9 * 3 * 2 * 16 * 16 * 4


@pytest.mark.parametrize(("vision", "projector"), [("all", 3 * 1152), ("none", 0)])
def test_inner_features_count_with_their_projectors(vision: str, projector: int) -> None:
    block = 10 * 1152 + 2 * 4304  # its MLP has no gate
    kept = 27 * block if vision == "all" else 0
    features = 4096 * (1000 + 1000 / 8)  # all images, and this rank's part of the tokens
    found = count_tower_activations(QWEN3, STEP, vision, in_flight=2)
    wanted = BYTES * (2 * kept + block + 2 * 3 * projector) + 2 * 3 * features * 2
    assert found == pytest.approx(wanted)


def test_later_stages_keep_the_features_that_they_get() -> None:
    """Behind the first layer, two of three features are still to be added."""
    feature = 2 * 4096 * 1000 / 8  # this rank's part of the tokens
    assert count_received_features(QWEN3, STEP, [range(1, 18)], 3) == pytest.approx(3 * 2 * feature)
    assert count_received_features(QWEN3, STEP, [range(0, 1), range(2, 3)], 1) == pytest.approx(
        feature
    )
    assert count_received_features(QWEN3, STEP, [range(3, 18)], 3) == 0
    assert count_received_features(QWEN, STEP, [range(1, 14)], 3) == 0


def test_moonvit_has_no_gate_and_images_without_frames() -> None:
    block = 10 * 1152 + 2 * 4304
    found = count_tower_activations(KIMI_VL, STEP, "all", in_flight=2)
    assert found == pytest.approx(BYTES * (2 * 27 * block + block))
    assert count_pixel_bytes(KIMI_VL, 100) == 100 * 4 * 3 * 14 * 14 * 4


def test_fewer_tokens_of_images_take_less() -> None:
    """The features of a rank's own tokens are as many as before."""
    half = replace(STEP, image_share=0.5)
    for config in (QWEN, KIMI_VL):
        whole = count_tower_activations(config, STEP, "all", in_flight=2)
        assert count_tower_activations(config, half, "all", in_flight=2) == pytest.approx(whole / 2)
    own = 2 * 3 * 4096 * (1000 / 8) * 2
    whole = count_tower_activations(QWEN3, STEP, "all", in_flight=2) - own
    found = count_tower_activations(QWEN3, half, "all", in_flight=2) - own
    assert found == pytest.approx(whole / 2)


def test_a_recipe_says_how_many_tokens_are_of_images() -> None:
    shares = []
    for settings in ([], ["plan.image_share=0.5"]):
        run = PlannedRun.make(load_recipe("qwen2_5_vl_7b_grpo_8", settings))
        [uses] = predict_trainer(run, NO_LINKS)
        shares.append((uses["tower's activations"], uses["pixels"], uses["activations"]))
    (tower, pixels, language), half = shares
    assert half == pytest.approx((tower / 2, pixels / 2, language))
