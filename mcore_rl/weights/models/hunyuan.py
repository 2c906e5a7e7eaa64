"""Hunyuan 3 (Hy3-preview): grouped queries with normed heads, shared experts, a biased router.

Its layers are those of GLM-4.5 with a whole rotary embedding, under names of their own:

    Megatron key                                HF name
    decoder.layers.mlp.router.weight        <-  model.layers.{layer}.mlp.router.gate.weight
    decoder.layers.mlp.router.expert_bias   <-  model.layers.{layer}.mlp.expert_bias
    decoder.layers.mlp.shared_experts.*     <-  model.layers.{layer}.mlp.shared_mlp.*
    mtp.layers.0.final_layernorm.weight     <-  model.layers.{layer}.final_layernorm.weight
"""

from collections.abc import Mapping
from typing import Any

from mcore_rl.weights.models import rules
from mcore_rl.weights.models.mtp import BEHIND_LAYERS, list_copies, make_mtp_rules
from mcore_rl.weights.models.settings import (
    BIASED_SIGMOID,
    PLAIN_SETTINGS,
    find_mlp_types_refusal,
    find_rope_theta_refusal,
    is_after_dense_layers,
    make_base_options,
    make_expert_options,
    make_grouped_query_options,
    match_mtp_names,
    need,
    read_base_sizes,
    read_grouped_query_sizes,
)
from mcore_rl.weights.models.table import Family, HfConfig, HfTensor

ROUTER = "mlp.router.weight"


def read_hunyuan_sizes(config: HfConfig) -> Mapping[str, int]:
    expert_ffn = need(config, "moe_intermediate_size")
    return {
        **read_base_sizes(config),
        **read_grouped_query_sizes(config, qk_norm="head"),
        "experts": need(config, "num_experts", "num_local_experts"),
        "expert_ffn": expert_ffn,
        "shared_ffn": expert_ffn * (config.get("num_shared_experts") or 0),
    }


def make_hunyuan_options(config: HfConfig) -> dict[str, Any]:
    sizes = read_hunyuan_sizes(config)
    return {
        **make_base_options(config),
        **make_grouped_query_options(sizes),
        **make_expert_options(config, sizes),
        "moe_shared_expert_intermediate_size": sizes["shared_ffn"] or None,
        "moe_router_topk_scaling_factor": config.get("router_scaling_factor", 1.0),
        **BIASED_SIGMOID,
    }


MOE_LAYER = (
    *rules.GROUPED_QUERY_ATTENTION,
    *(rule for rule in rules.EXPERTS if not rule.key.endswith(ROUTER)),
    rules.make_layer_rule(ROUTER, "mlp.router.gate.weight", "experts", "hidden", where="moe"),
    rules.make_expert_bias_rule("mlp.expert_bias"),
    *rules.make_shared_expert_rules("mlp.shared_mlp"),
)
MTP_MODULES = {
    **BEHIND_LAYERS,
    "final_layernorm.weight": HfTensor(rules.HF_LAYER + "final_layernorm.weight", ("hidden",)),
}

HUNYUAN_V3 = Family(
    "HYV3ForCausalLM",
    (*rules.MODEL, *rules.DENSE_MLP, *MOE_LAYER, *make_mtp_rules(MOE_LAYER, MTP_MODULES)),
    read_hunyuan_sizes,
    is_after_dense_layers,
    make_hunyuan_options,
    {
        **PLAIN_SETTINGS,
        "qk_norm": (True,),
        "use_qk_norm": (True,),
        "route_norm": (True,),
        "moe_router_use_sigmoid": (True,),
        "moe_router_enable_expert_bias": (True,),
    },
    refusal=lambda config: find_mlp_types_refusal(config) or find_rope_theta_refusal(config),
    carried=match_mtp_names,
    copies=list_copies,
    explicit=(
        "num_key_value_heads",
        "head_dim",
        "first_k_dense_replace",
        "num_shared_experts",
        "router_scaling_factor",
    ),
)
