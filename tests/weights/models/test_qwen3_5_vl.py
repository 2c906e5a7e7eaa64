"""The tables of Qwen3.5 with a tower name every tensor, and refuse what engines cannot carry."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from mcore_rl.weights.hf.config import read_hf_config
from mcore_rl.weights.layouts.sglang_models import SGLangSizes, refuse_unserved
from mcore_rl.weights.layouts.tensors import Tensors
from mcore_rl.weights.models import family_of, refuse_unsupported
from mcore_rl.weights.models.qwen_vl import QWEN3_5_VL, QWEN3_5_VL_MOE
from mcore_rl.weights.models.table import Family
from mcore_rl.weights.models.value_head import add_value_head
from tests.support.layout_strategies import names_of
from tests.support.tiny_qwen3_vl import write_qwen3_5_model, write_qwen3_5_moe_model

PUBLISHED = Path("recipes/model/qwen3_5_35b_a3b")
EXPERTS = "model.language_model.layers.0.mlp.experts."


@pytest.mark.parametrize(
    ("write", "family"),
    [(write_qwen3_5_model, QWEN3_5_VL), (write_qwen3_5_moe_model, QWEN3_5_VL_MOE)],
)
def test_the_table_is_what_is_saved(tmp_path: Path, write: Any, family: Family) -> None:
    folder = write(tmp_path)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    config = read_hf_config(folder)
    assert family_of(config) is family
    assert family.shapes(config) == saved
    assert sorted(names_of(Tensors(family, config, "bfloat16"))) == sorted(saved)


def test_the_published_model_has_experts_upright_and_half_of_the_frequencies_of_a_quarter() -> None:
    config = read_hf_config(PUBLISHED)
    refuse_unsupported(config)
    refuse_unserved(config, SGLangSizes(tp=4, ep=4), "bfloat16")
    shapes = QWEN3_5_VL_MOE.shapes(config)
    assert shapes[EXPERTS + "gate_up_proj"] == (256, 1024, 2048)
    assert shapes[EXPERTS + "down_proj"] == (256, 2048, 512)
    rule, _ = QWEN3_5_VL_MOE.find("decoder.layers.2.mlp.experts.experts.linear_fc1.weight")
    assert (rule.stacked, rule.upright, rule.halves) == (True, True, True)
    assert QWEN3_5_VL_MOE.options(config)["mrope_section"] == [11, 11, 10]
    assert QWEN3_5_VL_MOE.rotary_share(config) == 0.25
    assert not [name for name in shapes if "deepstack" in name]
    assert QWEN3_5_VL_MOE.is_carried(config, "mtp.layers.0.input_layernorm.weight")


def test_the_published_model_has_as_many_parameters_as_transformers_makes() -> None:
    from transformers import AutoConfig, Qwen3_5MoeForConditionalGeneration

    with torch.device("meta"):
        model = Qwen3_5MoeForConditionalGeneration(AutoConfig.from_pretrained(PUBLISHED))
    wanted = sum(parameter.numel() for parameter in model.parameters())
    shapes = QWEN3_5_VL_MOE.shapes(read_hf_config(PUBLISHED))
    assert sum(map(prod, shapes.values())) == wanted
    assert 35.1e9 < wanted < 35.2e9


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("vision_config", {"deepstack_visual_indexes": [1]}, r"deepstack_visual_indexes=\[1\]"),
        ("rope_parameters", {"mrope_section": [10, 12, 10]}, r"mrope_section=\[10, 12, 10\]"),
        ("rope_parameters", {"mrope_section": [24, 20, 20]}, "what is rotated of a head, 32"),
        ("rope_parameters", {"mrope_interleaved": False}, "mrope_interleaved=False"),
    ],
)
def test_unsupported_settings_are_refused(
    tmp_path: Path, part: str, change: dict[str, Any], message: str
) -> None:
    config = json.loads((PUBLISHED / "config.json").read_text())
    (config if part in config else config["text_config"])[part] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        refuse_unsupported(read_hf_config(tmp_path))


@pytest.mark.parametrize(
    ("part", "name", "message"),
    [
        ("vision_config", "deepstack_visual_indexes", "write an empty list"),
        ("text_config", "full_attention_interval", "no 'full_attention_interval'"),
    ],
)
def test_settings_that_sglang_would_guess_are_refused(
    tmp_path: Path, part: str, name: str, message: str
) -> None:
    config = json.loads((PUBLISHED / "config.json").read_text())
    del config[part][name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        refuse_unserved(read_hf_config(tmp_path), SGLangSizes())


@pytest.mark.parametrize("kind", ["MoeForConditionalGeneration", "ForCausalLM"])
def test_a_rotary_share_that_sglang_does_not_read_is_refused(tmp_path: Path, kind: str) -> None:
    config = json.loads((PUBLISHED / "config.json").read_text())
    config["architectures"] = [f"Qwen3_5{kind}"]
    text = config["text_config"]
    text["intermediate_size"] = text["moe_intermediate_size"]
    text["rope_parameters"] |= {"partial_rotary_factor": 0.5, "mrope_section": [22, 21, 21]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = r"partial_rotary_factor = 0.5 .* takes 0.25: write it there, too"
    with pytest.raises(ValueError, match=message):
        refuse_unserved(read_hf_config(tmp_path), SGLangSizes())
    text["partial_rotary_factor"] = 0.5
    (tmp_path / "config.json").write_text(json.dumps(config))
    refuse_unserved(read_hf_config(tmp_path), SGLangSizes())


def test_twins_with_and_without_a_tower_have_names_of_their_own() -> None:
    """transformers has classes of these two names."""
    twins = {
        "Qwen3_5ForCausalLM": "Qwen3_5TextForSequenceClassification",
        "Qwen3_5ForConditionalGeneration": "Qwen3_5ForSequenceClassification",
    }
    for architecture, twin in twins.items():
        config = add_value_head({"architectures": [architecture]})
        assert config["architectures"] == [twin]
        assert family_of(config).has_tower == ("Text" not in twin)
