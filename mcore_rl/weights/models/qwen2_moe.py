"""Qwen2-MoE: biases of queries, keys and values, softmax routing, and a gated shared expert.

The gate is a sigmoid per token: the shared expert's output is multiplied with it.
"""

from collections.abc import Mapping
from typing import Any

from mcore_rl.weights.models import rules
from mcore_rl.weights.models.settings import (
    PLAIN_SETTINGS,
    base_options,
    base_sizes,
    expert_options,
    grouped_query_options,
    grouped_query_sizes,
    need,
    sparse_layers,
)
from mcore_rl.weights.models.table import Family, HfConfig


def sizes(config: HfConfig) -> Mapping[str, int]:
    return {
        **base_sizes(config),
        **grouped_query_sizes(config, qkv_bias=config.get("qkv_bias", True)),
        "experts": need(config, "num_experts", "num_local_experts"),
        "expert_ffn": need(config, "moe_intermediate_size"),
        "shared_ffn": need(config, "shared_expert_intermediate_size"),
        "one": 1,
    }


def options(config: HfConfig) -> dict[str, Any]:
    return {
        **base_options(config),
        **grouped_query_options(sizes(config)),
        **expert_options(config, sizes(config)),
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
        "moe_shared_expert_intermediate_size": sizes(config)["shared_ffn"],
        "moe_shared_expert_gate": True,
    }


GATE = rules.layer_rule(
    "mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", "one", "hidden", where="moe"
)

FAMILY = Family(
    "Qwen2MoeForCausalLM",
    (
        *rules.MODEL,
        *rules.GROUPED_QUERY_ATTENTION,
        *rules.DENSE_MLP,
        *rules.EXPERTS,
        *rules.shared_experts("mlp.shared_expert"),
        GATE,
    ),
    sizes,
    sparse_layers,
    options,
    PLAIN_SETTINGS,
    explicit=("num_key_value_heads",),
)
