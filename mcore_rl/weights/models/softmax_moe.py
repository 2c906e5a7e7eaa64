"""Models with grouped-query attention and softmax routing: Qwen3-MoE, Mixtral and OLMoE.

Qwen3-MoE normalizes the queries and keys of each head, OLMoE those of all heads together, Mixtral
neither.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from mcore_rl.weights.models import rules
from mcore_rl.weights.models.settings import (
    PLAIN_SETTINGS,
    QkNorm,
    base_options,
    base_sizes,
    every_layer,
    expert_options,
    grouped_query_options,
    grouped_query_sizes,
    need,
    rope_theta_refusal,
    sparse_layers,
)
from mcore_rl.weights.models.table import Family, HfConfig


def _sizes(config: HfConfig, *, qk_norm: QkNorm, expert_ffn: str) -> Mapping[str, int]:
    return {
        **base_sizes(config),
        **grouped_query_sizes(config, qk_norm=qk_norm),
        "experts": need(config, "num_experts", "num_local_experts"),
        "expert_ffn": need(config, expert_ffn),
    }


def _options(
    config: HfConfig, *, qk_norm: QkNorm, expert_ffn: str, always_normalized: bool = False
) -> dict[str, Any]:
    sizes = _sizes(config, qk_norm=qk_norm, expert_ffn=expert_ffn)
    return {
        **base_options(config),
        **grouped_query_options(sizes),
        **expert_options(config, sizes),
        "moe_router_pre_softmax": not (always_normalized or config.get("norm_topk_prob", False)),
    }


QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    (*rules.MODEL, *rules.GROUPED_QUERY_ATTENTION, *rules.DENSE_MLP, *rules.EXPERTS),
    partial(_sizes, qk_norm="head", expert_ffn="moe_intermediate_size"),
    sparse_layers,
    partial(_options, qk_norm="head", expert_ffn="moe_intermediate_size"),
    PLAIN_SETTINGS,
    explicit=("num_key_value_heads",),
)

MIXTRAL = Family(
    "MixtralForCausalLM",
    (*rules.MODEL, *rules.GROUPED_QUERY_ATTENTION, *rules.NUMBERED_EXPERTS),
    partial(_sizes, qk_norm="none", expert_ffn="intermediate_size"),
    every_layer,
    partial(_options, qk_norm="none", expert_ffn="intermediate_size", always_normalized=True),
    {**PLAIN_SETTINGS, "sliding_window": (None,)},
    refusal=rope_theta_refusal,
    explicit=("num_key_value_heads",),
)

OLMOE = Family(
    "OlmoeForCausalLM",
    (*rules.MODEL, *rules.GROUPED_QUERY_ATTENTION, *rules.EXPERTS),
    partial(_sizes, qk_norm="projection", expert_ffn="intermediate_size"),
    every_layer,
    partial(_options, qk_norm="projection", expert_ffn="intermediate_size"),
    {**PLAIN_SETTINGS, "clip_qkv": (None,)},
)
