"""GLM-4.5's table against the published configuration."""

import json
from pathlib import Path

import pytest

from mcore_rl.weights.models.glm4_minimax import GLM4_MOE

CONFIG = json.loads(Path("recipes/model/glm_4_5_air/config.json").read_text())


def test_options_of_glm_4_5_air() -> None:
    options = GLM4_MOE.options(CONFIG)
    assert options["num_moe_experts"] == 128
    assert options["moe_router_score_function"] == "sigmoid"
    assert options["kv_channels"] == 128
    assert not GLM4_MOE.is_moe_layer(CONFIG, 0)
    assert GLM4_MOE.is_moe_layer(CONFIG, 1)
    assert GLM4_MOE.rotary_share(CONFIG) == 0.5


@pytest.mark.parametrize("on", [False, True])
def test_norms_and_biases_are_settings(on: bool) -> None:
    names = GLM4_MOE.shapes(CONFIG | {"use_qk_norm": on, "attention_bias": on})
    assert ("model.layers.3.self_attn.q_norm.weight" in names) == on
    assert ("model.layers.3.self_attn.q_proj.bias" in names) == on


def test_the_bias_of_experts_is_a_float32_tensor_of_layers_with_experts() -> None:
    dtypes = GLM4_MOE.dtypes(CONFIG, "bfloat16")
    name = "model.layers.{}.mlp.gate.e_score_correction_bias"
    assert name.format(0) not in dtypes
    assert dtypes[name.format(1)] == "float32"
