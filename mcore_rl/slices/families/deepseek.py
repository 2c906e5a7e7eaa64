"""DeepSeek-V3 (also R1, Kimi-K2, Moonlight) and V2: latent attention, shared experts, dense first layers."""

from collections.abc import Mapping
from typing import Any

from mcore_rl.slices.families import rules
from mcore_rl.slices.families.settings import (
    PLAIN_SETTINGS,
    base_options,
    base_sizes,
    expert_options,
    latent_options,
    latent_sizes,
    need,
)
from mcore_rl.slices.families.table import Family, HfConfig

EXPERT_BIAS = rules.layer_rule(
    "mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", "experts", where="moe", dtype="float32"
)
"""What keeps the experts' load even without a loss: added to the scores for choosing experts only. A buffer
in Megatron, which no gradient changes; training here leaves it as it was loaded."""

SETTINGS = {**PLAIN_SETTINGS, "rope_interleave": (True,), "moe_layer_freq": (1,)}


def sizes(config: HfConfig) -> Mapping[str, int]:
    expert_ffn = need(config, "moe_intermediate_size")
    return {
        **base_sizes(config),
        **latent_sizes(config),
        "experts": need(config, "n_routed_experts", "num_local_experts"),
        "expert_ffn": expert_ffn,
        "shared_ffn": expert_ffn * (config.get("n_shared_experts") or 0),
    }


def is_moe_layer(config: HfConfig, layer: int) -> bool:
    return layer >= config.get("first_k_dense_replace", 0)


def _options(config: HfConfig) -> dict[str, Any]:
    options = {
        **base_options(config),
        **latent_options(config),
        **expert_options(config, sizes(config)),
        "moe_shared_expert_intermediate_size": sizes(config)["shared_ffn"] or None,
        "moe_router_topk_scaling_factor": config.get("routed_scaling_factor", 1.0),
    }
    if (config.get("n_group") or 1) > 1:
        options["moe_router_num_groups"] = config["n_group"]
        options["moe_router_group_topk"] = need(config, "topk_group")
    return options


def _v3_options(config: HfConfig) -> dict[str, Any]:
    return {
        **_options(config),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
    }


def _v2_options(config: HfConfig) -> dict[str, Any]:
    return {**_options(config), "moe_router_pre_softmax": True}


def _group_refusal(config: HfConfig, scored_by: int) -> str:
    """megatron-core scores a group by the sum of its best top_k // topk_group experts."""
    if (config.get("n_group") or 1) == 1:
        return ""
    top_k, groups = need(config, "num_experts_per_tok"), need(config, "topk_group")
    if top_k // groups == scored_by:
        return ""
    return (
        f"num_experts_per_tok={top_k} and topk_group={groups}: Megatron would score a group of experts by its"
        f" best {top_k // groups}, the model by its best {scored_by}"
    )


def _mtp_names(config: HfConfig) -> str:
    """Multi-token-prediction layers come after the others and only serve speculative decoding."""
    first, count = need(config, "num_hidden_layers"), config.get("num_nextn_predict_layers") or 0
    layers = "|".join(map(str, range(first, first + count)))
    return rf"model\.layers\.({layers})\..*" if count else ""


V3 = Family(
    "DeepseekV3ForCausalLM",
    (
        *rules.MODEL,
        *rules.LATENT_ATTENTION,
        *rules.DENSE_MLP,
        *rules.EXPERTS,
        EXPERT_BIAS,
        *rules.SHARED_EXPERTS,
    ),
    sizes,
    is_moe_layer,
    _v3_options,
    {**SETTINGS, "topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",), "norm_topk_prob": (True,)},
    rope_types=("default", "yarn"),
    refusal=lambda config: _group_refusal(config, 2),
    carried=_mtp_names,
)

V2 = Family(
    "DeepseekV2ForCausalLM",
    (*rules.MODEL, *rules.LATENT_ATTENTION, *rules.DENSE_MLP, *rules.EXPERTS, *rules.SHARED_EXPERTS),
    sizes,
    is_moe_layer,
    _v2_options,
    {
        **SETTINGS,
        "topk_method": ("greedy", "group_limited_greedy"),
        "scoring_func": ("softmax",),
        "norm_topk_prob": (False,),
    },
    rope_types=("default", "yarn"),
    refusal=lambda config: _group_refusal(config, 1) if config.get("topk_method") != "greedy" else "",
)
