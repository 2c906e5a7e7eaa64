"""Kimi-VL's table names every tensor of the published layout, and refuses what it cannot carry."""

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from mcore_rl.weights.hf.config import read_hf_config
from mcore_rl.weights.models import refuse_unsupported
from mcore_rl.weights.models.moonvit import KIMI_VL, read_kimi_vl_sizes, read_moonvit_sizes
from tests.support.tiny_kimi_vl import VISION, write_kimi_vl_model

PUBLISHED: dict[str, Any] = {
    "model_type": "moonvit",
    "patch_size": 14,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "merge_kernel_size": [2, 2],
}


def test_the_table_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    config = read_hf_config(write_kimi_vl_model(tmp_path))
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert KIMI_VL.shapes(config) == saved
    assert KIMI_VL.embedding == "language_model.model.embed_tokens.weight"
    assert KIMI_VL.has_tower


def test_the_published_tower_has_its_size(tmp_path: Path) -> None:
    config = {**read_hf_config(write_kimi_vl_model(tmp_path)), "vision_config": PUBLISHED}
    found = read_moonvit_sizes(config)
    assert (found["merged"], found["tower_qkv"], found["patch_frames"]) == (4608, 3456, 1)
    shapes = KIMI_VL.shapes(config)
    assert shapes["vision_tower.patch_embed.pos_emb.weight"] == (64, 64, 1152)
    assert shapes["vision_tower.encoder.blocks.26.mlp.fc0.weight"] == (4304, 1152)
    assert read_kimi_vl_sizes(config)["hidden"] == config["hidden_size"]


def test_layers_for_speculation_may_lie_beside_the_model(tmp_path: Path) -> None:
    config = read_hf_config(write_kimi_vl_model(tmp_path))
    name = "language_model.model.layers.4.eh_proj.weight"
    assert not KIMI_VL.is_carried(config, name)
    assert KIMI_VL.is_carried({**config, "num_nextn_predict_layers": 1}, name)
    frequencies = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert KIMI_VL.is_carried(config, "language_model." + frequencies)
    assert not KIMI_VL.is_carried(config, frequencies)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type='yarn'"),
        ({"rope_parameters": None, "rope_theta": None}, "lacks 'rope_theta'"),
        ({"media_placeholder_token_id": None}, "lacks 'media_placeholder_token_id'"),
        ({"vision_config": {**VISION, "model_type": "moonvit3d"}}, "model_type='moonvit3d'"),
        ({"vision_config": {**VISION, "patch_size": 16}}, "patch_size=16 of vision_config"),
        ({"vision_config": {**VISION, "merge_kernel_size": [2, 1]}}, r"merge_kernel_size=\[2, 1\]"),
        ({"vision_config": {**VISION, "num_attention_heads": 16}}, "multiple of 4"),
        ({"vision_config": {**VISION, "num_hidden_layers": None}}, "lacks 'num_hidden_layers'"),
    ],
)
def test_unsupported_settings_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    config = read_hf_config(write_kimi_vl_model(tmp_path))
    with pytest.raises(ValueError, match=message):
        refuse_unsupported({**config, **change})
