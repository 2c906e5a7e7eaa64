"""Hunyuan 3's table against the published configuration, and what is refused."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.weights.models import family_of, refuse_unsupported
from mcore_rl.weights.models.hunyuan import HUNYUAN_V3

CONFIG = json.loads(Path("recipes/model/hy3_preview/config.json").read_text())


def test_parameters_add_up_to_the_published_number() -> None:
    assert family_of(CONFIG) is HUNYUAN_V3
    assert round(sum(map(prod, HUNYUAN_V3.shapes(CONFIG).values())) / 1e9) == 295


def test_the_router_scores_by_sigmoid_and_its_bias_only_chooses() -> None:
    options = HUNYUAN_V3.options(CONFIG)
    assert options["moe_router_score_function"] == "sigmoid"
    assert options["moe_router_enable_expert_bias"]
    assert options["moe_router_topk_scaling_factor"] == 2.826
    assert options["moe_shared_expert_intermediate_size"] == 1536
    assert options["qk_layernorm"] and not options["add_qkv_bias"]
    assert HUNYUAN_V3.rotary_share(CONFIG) == 1.0


def test_names_are_those_of_the_published_files() -> None:
    dtypes = HUNYUAN_V3.dtypes(CONFIG, "bfloat16")
    assert dtypes["model.layers.1.mlp.expert_bias"] == "float32"
    assert "model.layers.1.mlp.router.gate.weight" in dtypes
    assert "model.layers.79.mlp.shared_mlp.down_proj.weight" in dtypes
    assert "model.layers.0.mlp.gate_proj.weight" in dtypes
    assert "model.layers.0.mlp.expert_bias" not in dtypes
    assert HUNYUAN_V3.is_carried(CONFIG, "model.layers.80.eh_proj.weight")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_norm": False}, "qk_norm=False in config.json: only True is supported"),
        ({"route_norm": False}, "route_norm=False in config.json: only True is supported"),
        ({"moe_router_use_sigmoid": False}, "moe_router_use_sigmoid=False"),
        ({"mlp_layer_types": ["sparse"] * 80}, "first_k_dense_replace=1 says"),
        ({"rope_parameters": {"rope_type": "default"}}, "lacks 'rope_theta'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type='yarn'"),
    ],
)
def test_other_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    refuse_unsupported(CONFIG)
    with pytest.raises(ValueError, match=message):
        refuse_unsupported(CONFIG | changes)


@pytest.mark.parametrize("key", HUNYUAN_V3.explicit)
def test_keys_with_other_defaults_have_to_be_there(key: str) -> None:
    config = {name: value for name, value in CONFIG.items() if name != key}
    with pytest.raises(ValueError, match=f"lacks '{key}'"):
        refuse_unsupported(config)
