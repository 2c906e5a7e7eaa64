"""Qwen2-MoE's table: biases, and a shared expert behind a gate."""

import pytest

from mcore_rl.weights.models.qwen_llama_mixtral import QWEN2_MOE
from tests.support.megatron_layout import model_config

CONFIG = model_config(
    architectures=["Qwen2MoeForCausalLM"], shared_expert_intermediate_size=6, num_experts=4
)


@pytest.mark.parametrize(("changes", "has_bias"), [({}, True), ({"qkv_bias": False}, False)])
def test_biases_are_there_unless_switched_off(changes: dict[str, bool], has_bias: bool) -> None:
    assert (
        "model.layers.0.self_attn.q_proj.bias" in QWEN2_MOE.shapes(CONFIG | changes)
    ) == has_bias
    assert QWEN2_MOE.options(CONFIG | changes)["add_qkv_bias"] == has_bias


def test_the_shared_expert_has_a_gate_of_one_row() -> None:
    shapes = QWEN2_MOE.shapes(CONFIG)
    assert shapes["model.layers.0.mlp.shared_expert_gate.weight"] == (1, 8)
    assert shapes["model.layers.0.mlp.shared_expert.up_proj.weight"] == (6, 8)
    assert "model.layers.1.mlp.shared_expert_gate.weight" not in shapes
    options = QWEN2_MOE.options(CONFIG)
    assert options["moe_shared_expert_gate"]
    assert options["moe_shared_expert_intermediate_size"] == 6


@pytest.mark.parametrize(("normalized", "pre_softmax"), [(True, False), (False, True)])
def test_scores_are_normalized_before_or_after_the_choice(
    normalized: bool, pre_softmax: bool
) -> None:
    options = QWEN2_MOE.options(CONFIG | {"norm_topk_prob": normalized})
    assert options["moe_router_pre_softmax"] == pre_softmax
