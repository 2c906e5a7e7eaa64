"""MiniMax-M2's table: norms over all heads, partly rotated heads, and what is refused."""

from typing import Any

import pytest

from mcore_rl.weights.models.glm4_minimax import MINIMAX_M2
from tests.support.layout_strategies import NORMALIZED
from tests.support.megatron_layout import model_config

CONFIG = model_config(
    **NORMALIZED, num_key_value_heads=2, head_dim=4, num_experts=None, rope_theta=5e6
)


def test_queries_and_keys_are_normalized_over_all_heads() -> None:
    shapes = MINIMAX_M2.shapes(CONFIG)
    assert shapes["model.layers.0.self_attn.q_norm.weight"] == (32,)
    assert shapes["model.layers.0.self_attn.k_norm.weight"] == (8,)
    assert MINIMAX_M2.options(CONFIG)["qk_layernorm"]


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, 0.25),
        ({"rotary_dim": 2}, 0.5),
        ({"rotary_dim": None}, 1.0),
        ({"partial_rotary_factor": 0.75}, 0.75),
    ],
)
def test_the_rotated_share_of_a_head(changes: dict[str, Any], share: float) -> None:
    assert MINIMAX_M2.rotary_share(CONFIG | changes) == share


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"attn_type_list": [1, 1, 1]}, ""),
        ({"attn_type_list": [1, 0, 1]}, "kinds of attention other than 1"),
        ({"rope_theta": None}, "lacks 'rope_theta'"),
    ],
)
def test_other_kinds_of_attention_are_refused(changes: dict[str, Any], message: str) -> None:
    refusal = MINIMAX_M2.refusal(CONFIG | changes)
    assert message in refusal
    assert bool(message) == bool(refusal)
