"""GLM-4.7-Flash's table against the published configuration, and what is refused."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.weights.models import family_of, refuse_unsupported
from mcore_rl.weights.models.deepseek import GLM4_MOE_LITE

CONFIG = json.loads(Path("recipes/model/glm_4_7_flash/config.json").read_text())


def test_parameters_add_up_to_the_published_number() -> None:
    assert family_of(CONFIG) is GLM4_MOE_LITE
    assert round(sum(map(prod, GLM4_MOE_LITE.shapes(CONFIG).values())) / 1e9) == 30


def test_attention_is_latent_and_one_expert_is_shared() -> None:
    options = GLM4_MOE_LITE.options(CONFIG)
    assert options["multi_latent_attention"] and options["rotary_base"] == 1e6
    assert options["moe_router_topk_scaling_factor"] == 1.8
    assert options["moe_shared_expert_intermediate_size"] == 1536
    assert not GLM4_MOE_LITE.is_moe_layer(CONFIG, 0)
    assert GLM4_MOE_LITE.is_moe_layer(CONFIG, 1)


def test_the_layer_for_multi_token_prediction_is_carried() -> None:
    assert GLM4_MOE_LITE.is_carried(CONFIG, "model.layers.47.eh_proj.weight")
    assert not GLM4_MOE_LITE.is_carried(CONFIG, "model.layers.46.mlp.gate.weight")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_layer_types": ["sparse"] * 47}, "first_k_dense_replace=1 says"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 .*only 1.0 is supported"),
        ({"rope_theta": None}, "lacks 'rope_theta'"),
        ({"n_group": 8, "topk_group": 1}, "Megatron would score a group"),
    ],
)
def test_other_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    refuse_unsupported(CONFIG)
    refuse_unsupported(CONFIG | {"mlp_layer_types": ["dense"] + ["sparse"] * 46})
    with pytest.raises(ValueError, match=message):
        refuse_unsupported(CONFIG | changes)
