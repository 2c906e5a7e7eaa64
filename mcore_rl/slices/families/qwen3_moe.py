"""Qwen3-MoE: grouped-query attention with norms of queries and keys, softmax routing, no shared experts."""

from collections.abc import Mapping
from typing import Any

from mcore_rl.slices.families import rules
from mcore_rl.slices.families.settings import (
    PLAIN_SETTINGS,
    base_options,
    base_sizes,
    expert_options,
    grouped_query_options,
    grouped_query_sizes,
    need,
)
from mcore_rl.slices.families.table import Family, HfConfig


def sizes(config: HfConfig) -> Mapping[str, int]:
    return {
        **base_sizes(config),
        **grouped_query_sizes(config, qk_norm=True),
        "experts": need(config, "num_experts", "num_local_experts"),
        "expert_ffn": need(config, "moe_intermediate_size"),
    }


def is_moe_layer(config: HfConfig, layer: int) -> bool:
    """As Qwen3MoeDecoderLayer in transformers decides it."""
    return (
        layer not in (config.get("mlp_only_layers") or ())
        and sizes(config)["experts"] > 0
        and (layer + 1) % config.get("decoder_sparse_step", 1) == 0
    )


def options(config: HfConfig) -> dict[str, Any]:
    return {
        **base_options(config),
        **grouped_query_options(sizes(config)),
        **expert_options(config, sizes(config)),
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
    }


FAMILY = Family(
    "Qwen3MoeForCausalLM",
    (*rules.MODEL, *rules.GROUPED_QUERY_ATTENTION, *rules.DENSE_MLP, *rules.EXPERTS),
    sizes,
    is_moe_layer,
    options,
    PLAIN_SETTINGS,
)
