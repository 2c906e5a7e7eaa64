"""The tables of Qwen3-VL name every tensor, and refuse what they or engines cannot carry."""

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from mcore_rl.weights.hf.config import read_hf_config
from mcore_rl.weights.layouts.tensors import Tensors
from mcore_rl.weights.models import refuse_unsupported
from mcore_rl.weights.models.qwen_vl import QWEN3_VL, QWEN3_VL_MOE
from mcore_rl.weights.models.table import Family, HfConfig, number_key
from mcore_rl.weights.models.tower import is_frozen
from tests.support.layout_strategies import names_of
from tests.support.tiny_qwen3_vl import (
    EXPERTS,
    TEXT,
    VISION,
    write_qwen3_vl_model,
    write_qwen3_vl_moe_model,
)

ROPE = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    **{key: value for key, value in TEXT.items() if key != "rope_parameters"},
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e6,
    "rope_scaling": ROPE,
    "vision_config": VISION,
}
"""config.json of the dense model, with the rotary settings that the published files have."""
MOE_CONFIG = {**CONFIG, **EXPERTS, "architectures": ["Qwen3VLMoeForConditionalGeneration"]}


@pytest.mark.parametrize(
    ("write", "family", "config"),
    [
        (write_qwen3_vl_model, QWEN3_VL, CONFIG),
        (write_qwen3_vl_moe_model, QWEN3_VL_MOE, MOE_CONFIG),
    ],
)
def test_the_table_is_what_is_saved(
    tmp_path: Path, write: Any, family: Family, config: HfConfig
) -> None:
    folder = write(tmp_path)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert family.shapes(read_hf_config(folder)) == saved
    assert family.shapes(config) == saved
    assert sorted(names_of(Tensors(family, config, "bfloat16"))) == sorted(saved)
    assert family.options(read_hf_config(folder)) == family.options(config)


def test_experts_lie_as_in_the_published_files() -> None:
    shapes = QWEN3_VL_MOE.shapes(MOE_CONFIG)
    experts = "model.language_model.layers.0.mlp.experts."
    assert shapes[experts + "gate_up_proj"] == (8, 64, 96)
    assert shapes[experts + "down_proj"] == (8, 48, 64)
    rule, layer = QWEN3_VL_MOE.find("decoder.layers.2.mlp.experts.experts.linear_fc1.weight")
    assert (rule.halves, rule.stacked, layer) == (True, True, 2)
    assert QWEN3_VL_MOE.options(MOE_CONFIG)["moe_router_pre_softmax"] is False


def test_projectors_of_inner_blocks_are_numbered() -> None:
    key = "visual.deepstack_merger_list.norm.weight"
    rule, number = QWEN3_VL.find(number_key(key, 2))
    assert (rule.key, rule.where, number) == (key, "deepstack", 2)
    assert number_key(key, 2) == "visual.deepstack_merger_list.2.norm.weight"
    fewer = {**CONFIG, "vision_config": {**VISION, "deepstack_visual_indexes": [1]}}
    names = QWEN3_VL.shapes(fewer)
    assert "model.visual.deepstack_merger_list.0.norm.weight" in names
    assert "model.visual.deepstack_merger_list.1.norm.weight" not in names


def test_all_projectors_are_trained_as_one_part() -> None:
    for key in ("visual.merger.norm.bias", "visual.deepstack_merger_list.2.linear_fc1.weight"):
        assert not is_frozen(key, "projector")
        assert is_frozen(key, "none")
    assert is_frozen("visual.blocks.0.norm1.weight", "projector")


def test_the_rotary_axes_take_turns() -> None:
    assert QWEN3_VL.options(CONFIG)["mrope_section"] == [4, 2, 2]
    assert QWEN3_VL.tied == {"lm_head.weight": "model.language_model.embed_tokens.weight"}


def with_tower(**changes: Any) -> dict[str, Any]:
    return {"vision_config": {**VISION, **changes}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {**ROPE, "mrope_section": [4, 2, 3]}}, "of a head, 8"),
        ({"rope_scaling": {**ROPE, "mrope_section": [2, 3, 3]}}, r"mrope_section=\[2, 3, 3\]"),
        ({"rope_scaling": {**ROPE, "mrope_interleaved": False}}, "mrope_interleaved=False"),
        ({"rope_scaling": {**ROPE, "rope_type": "yarn"}}, "rope_type='yarn'"),
        ({"rope_scaling": {"rope_type": "default"}}, "lack 'mrope_section'"),
        ({"rope_theta": None}, "lacks 'rope_theta'"),
        ({"head_dim": None}, "lacks 'head_dim'"),
        ({"attention_bias": True}, "attention_bias=True"),
        (with_tower(out_hidden_size=32), "out_hidden_size=32"),
        (with_tower(deepstack_visual_indexes=[1, 0]), r"deepstack_visual_indexes=\[1, 0\]"),
        (with_tower(deepstack_visual_indexes=[4]), "numbers of the 4 blocks"),
        (with_tower(deepstack_visual_indexes=None), "lacks 'deepstack_visual_indexes'"),
        ({"num_hidden_layers": 2}, "more than the 2 layers"),
        (with_tower(num_position_embeddings=24), "num_position_embeddings=24"),
        (with_tower(rope_parameters={"rope_theta": 5.0}), "rope_theta=5.0 of vision_config"),
    ],
)
def test_unsupported_settings_are_refused(change: dict[str, Any], message: str) -> None:
    refuse_unsupported(CONFIG)
    with pytest.raises(ValueError, match=message):
        refuse_unsupported({**CONFIG, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob=False"),
        ({"moe_intermediate_size": 32}, "moe_intermediate_size=32 makes a square"),
        ({"moe_intermediate_size": 64}, "moe_intermediate_size=64 makes a square"),
    ],
)
def test_unsupported_experts_are_refused(change: dict[str, Any], message: str) -> None:
    refuse_unsupported(MOE_CONFIG)
    with pytest.raises(ValueError, match=message):
        refuse_unsupported({**MOE_CONFIG, **change})
