"""Qwen2.5-VL's table names every tensor of a published layout, and refuses what it cannot carry."""

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from mcore_rl.weights.hf.config import read_hf_config
from mcore_rl.weights.layouts.tensors import Tensors
from mcore_rl.weights.models import refuse_unsupported
from mcore_rl.weights.models.qwen_vl import (
    QWEN2_5_VL,
    find_qwen2_5_vl_refusal,
    make_qwen2_5_vl_options,
)
from tests.support.layout_strategies import names_of
from tests.support.tiny_vision import TEXT, VISION, write_vision_model

FLAT: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    **{key: value for key, value in TEXT.items() if key != "rope_parameters"},
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "use_sliding_window": False,
    "vision_config": VISION,
}
"""config.json as the published models spell it."""


def test_the_table_is_what_transformers_saves(tmp_path: Path) -> None:
    config = read_hf_config(write_vision_model(tmp_path))
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert QWEN2_5_VL.shapes(config) == saved
    assert QWEN2_5_VL.shapes(FLAT) == saved
    assert make_qwen2_5_vl_options(config) == {
        **make_qwen2_5_vl_options(FLAT),
        "layernorm_epsilon": config["rms_norm_eps"],
    }


def test_tensors_of_blocks_are_found_by_name() -> None:
    tensors = Tensors(QWEN2_5_VL, FLAT, "bfloat16")
    names = names_of(tensors)
    assert sorted(names) == sorted(QWEN2_5_VL.shapes(FLAT))
    for name in names:
        found = tensors.find(name)
        assert found is not None
        assert found.entry.tensor.name.format(layer=found.layer) == name
    assert tensors.find("visual.blocks.3.norm1.weight") is None
    assert tensors.find("visual.merger.mlp.1.weight") is None


def test_keys_of_blocks_have_their_number() -> None:
    rule, block = QWEN2_5_VL.find("visual.blocks.2.attn.qkv.weight")
    assert (rule.where, block) == ("tower", 2)
    rule, block = QWEN2_5_VL.find("visual.merger.mlp.0.weight")
    assert (rule.where, block) == ("model", None)
    assert QWEN2_5_VL.has_tower


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}}, "of a head, 8"),
        ({"rope_scaling": {"type": "default"}}, "lack 'mrope_section'"),
        ({"rope_scaling": {"type": "yarn", "mrope_section": [2, 3, 3]}}, "rope_type='yarn'"),
        ({"vision_config": {**VISION, "out_hidden_size": 32}}, "out_hidden_size=32"),
        ({"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_unsupported_settings_are_refused(change: dict[str, Any], message: str) -> None:
    refuse_unsupported(FLAT)
    assert not find_qwen2_5_vl_refusal(FLAT)
    with pytest.raises(ValueError, match=message):
        refuse_unsupported({**FLAT, **change})
