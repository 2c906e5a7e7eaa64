"""Layouts that do not divide a model are refused in the words of the recipe."""

from typing import Any

import pytest

from mcore_rl.config import ParallelConfig
from mcore_rl.weights.models.recipe_checks import check_layout
from tests.support.layout_strategies import GROUPED
from tests.support.megatron_layout import model_config
from tests.weights.models.test_qwen3_vl import CONFIG as QWEN3_VL

GPT_OSS = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4}


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"tp": 4, "ep": 2, "etp": 2},
        {"pp": 3},
        {"pp": 2, "stage_layers": [1, 2]},
        {"pp": 2, "stage_layers": [2, 1]},
    ],
)
def test_layouts_that_divide_the_model_pass(layout: dict[str, Any]) -> None:
    check_layout(model_config(), ParallelConfig(**layout))


@pytest.mark.parametrize(
    ("changes", "layout", "message"),
    [
        ({}, {"tp": 3}, r"critic.tp=3 does not divide num_attention_heads=4"),
        ({}, {"pp": 2}, r"critic.pp \* critic.vpp=2 does not divide num_hidden_layers=3"),
        (
            {},
            {"pp": 2, "stage_layers": [2, 2]},
            r"critic.stage_layers=\[2, 2\] are 4 layers together, but num_hidden_layers=3",
        ),
        ({}, {"tp": 3, "ep": 3}, r"critic.tp=3 does not divide"),
        (
            {"num_experts": 6},
            {"dp": 4, "ep": 4},
            r"critic.ep=4 does not divide the number of experts",
        ),
        ({"moe_intermediate_size": 3}, {"tp": 2, "etp": 2}, r"critic.etp=2 does not divide"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4},
            {"tp": 6},
            r"critic.tp=6 neither divides num_key_value_heads=4 .* nor is a multiple of it",
        ),
        (
            GROUPED,
            {"dp": 2, "ep": 2},
            r"critic.ep=2, but the model has no experts: set critic.ep=1",
        ),
        (GPT_OSS, {"tp": 2, "etp": 2}, r"critic.etp=2, but the experts have biases"),
    ],
)
def test_sizes_that_do_not_divide_are_named_with_both_numbers(
    changes: dict[str, Any], layout: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_layout(model_config(**changes), ParallelConfig(**layout), "critic")


@pytest.mark.parametrize(
    "layout", [{"pp": 2}, {"pp": 2, "stage_layers": [1, 3]}, {"pp": 4}, {"pp": 2, "vpp": 2}]
)
def test_layers_that_take_features_of_a_tower_may_lie_on_any_stage(layout: dict[str, Any]) -> None:
    check_layout(QWEN3_VL, ParallelConfig(**layout))
