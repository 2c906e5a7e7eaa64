"""The rules of a tower give each block the tensors that transformers saves."""

from math import prod
from pathlib import Path

import pytest

from mcore_rl.weights.hf.config import read_hf_config
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.tower import (
    RULES,
    find_tower_refusal,
    merge_size,
    read_placeholder,
    read_tower_sizes,
    read_vision_settings,
)

VISION = {
    "depth": 2,
    "num_heads": 2,
    "hidden_size": 8,
    "intermediate_size": 12,
    "out_hidden_size": 16,
    "patch_size": 4,
}
CONFIG = {"hidden_size": 16, "vision_config": VISION}


def test_keys_and_names_are_the_same() -> None:
    for rule in RULES:
        [tensor] = rule.tensors
        assert tensor.name.replace("{layer}.", "") == rule.key
        assert ("{layer}" in tensor.name) == (rule.where == "tower")


def test_sizes_follow_the_vision_config() -> None:
    sizes = read_tower_sizes(CONFIG)
    assert sizes["tower_blocks"] == 2
    assert sizes["tower_qkv"] == 24
    assert sizes["merged"] == 32
    assert (sizes["channels"], sizes["patch_frames"], sizes["patch"]) == (3, 2, 4)


def test_a_tower_of_another_width_is_refused() -> None:
    assert not find_tower_refusal(CONFIG)
    assert "out_hidden_size=16" in find_tower_refusal({**CONFIG, "hidden_size": 32})


def test_either_key_gives_the_patches_of_a_token() -> None:
    assert merge_size(CONFIG) == 2
    assert merge_size({"vision_config": {"spatial_merge_size": 3}}) == 3
    assert merge_size({"vision_config": {"merge_kernel_size": [4, 4]}}) == 4
    with pytest.raises(ValueError, match=r"merge_kernel_size=\[2, 1\]"):
        merge_size({"vision_config": {"merge_kernel_size": [2, 1]}})


def test_either_key_names_the_placeholder() -> None:
    assert read_placeholder({"image_token_id": 0, "media_placeholder_token_id": 5}) == 0
    assert read_placeholder({"media_placeholder_token_id": 5}) == 5
    assert read_placeholder({}) is None


def test_missing_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"vision_config of config\.json lacks 'depth'"):
        read_tower_sizes({**CONFIG, "vision_config": {**VISION, "depth": None}})
    with pytest.raises(ValueError, match="lacks 'vision_config'"):
        read_vision_settings({})


@pytest.mark.parametrize(
    ("model", "num_tensors", "num_parameters"),
    [
        ("qwen2_5_vl_7b", 729, 8_292_166_656),
        ("qwen3_vl_8b", 750, 8_767_123_696),
        ("qwen3_vl_30b_a3b", 882, 31_070_754_032),
        ("glm_4_5v", 18_106, 107_710_933_120),
    ],
)
def test_models_of_recipes_have_the_tensors_of_the_published_files(
    model: str, num_tensors: int, num_parameters: int
) -> None:
    config = read_hf_config(Path("recipes/model", model))
    shapes = family_of(config).shapes(config)
    assert len(shapes) == num_tensors
    assert sum(map(prod, shapes.values())) == num_parameters
