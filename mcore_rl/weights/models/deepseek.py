"""DeepSeek-V3 (also R1, Kimi-K2 and Moonlight), DeepSeek-V2 and GLM-4.7-Flash.

All have latent attention, shared experts and dense first layers. V3 scores experts by sigmoid and
chooses them with a bias, as does GLM-4.7-Flash; V2 scores them by softmax.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_rl.weights.models import rules
from mcore_rl.weights.models.mtp import BEHIND_LAYERS, list_copies, make_mtp_rules
from mcore_rl.weights.models.settings import (
    BIASED_SIGMOID,
    PLAIN_SETTINGS,
    find_group_refusal,
    find_mlp_types_refusal,
    find_rope_theta_refusal,
    is_after_dense_layers,
    make_base_options,
    make_latent_options,
    make_shared_expert_options,
    match_mtp_names,
    read_base_sizes,
    read_latent_sizes,
    read_shared_expert_sizes,
)
from mcore_rl.weights.models.table import Family, HfConfig

SETTINGS = {**PLAIN_SETTINGS, "rope_interleave": (True,), "moe_layer_freq": (1,)}
FREQUENCIES = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
"""Names of rotary frequencies, which the files of Moonlight and Kimi-VL have in every layer."""


def _match_carried(config: HfConfig) -> str:
    return "|".join(filter(None, (match_mtp_names(config), FREQUENCIES)))


def read_deepseek_sizes(config: HfConfig) -> Mapping[str, int]:
    return {
        **read_base_sizes(config),
        **read_latent_sizes(config),
        **read_shared_expert_sizes(config),
    }


def _make_options(config: HfConfig) -> dict[str, Any]:
    return {
        **make_base_options(config),
        **make_latent_options(config),
        **make_shared_expert_options(config, read_deepseek_sizes(config)),
    }


def _make_v3_options(config: HfConfig) -> dict[str, Any]:
    return {**_make_options(config), **BIASED_SIGMOID}


def _make_v2_options(config: HfConfig) -> dict[str, Any]:
    return {**_make_options(config), "moe_router_pre_softmax": True}


MOE_LAYER = (
    *rules.LATENT_ATTENTION,
    *rules.EXPERTS,
    rules.make_expert_bias_rule("mlp.gate.e_score_correction_bias"),
    *rules.SHARED_EXPERTS,
)
LANGUAGE_RULES = (*rules.MODEL, *rules.DENSE_MLP, *MOE_LAYER)

DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    (*LANGUAGE_RULES, *make_mtp_rules(MOE_LAYER, BEHIND_LAYERS)),
    read_deepseek_sizes,
    is_after_dense_layers,
    _make_v3_options,
    {
        **SETTINGS,
        "topk_method": ("noaux_tc",),
        "scoring_func": ("sigmoid",),
        "norm_topk_prob": (True,),
    },
    rope_types=("default", "yarn"),
    refusal=lambda config: find_group_refusal(config, scored_by=2),
    carried=_match_carried,
    copies=list_copies,
    explicit=(
        "first_k_dense_replace",
        "n_group",
        "n_shared_experts",
        "q_lora_rank",
        "routed_scaling_factor",
    ),
)

GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    architecture="Glm4MoeLiteForCausalLM",
    supported={**DEEPSEEK_V3.supported, "partial_rotary_factor": (1.0,)},
    refusal=lambda config: (
        find_mlp_types_refusal(config)
        or find_rope_theta_refusal(config)
        or DEEPSEEK_V3.refusal(config)
    ),
)

DEEPSEEK_V2 = Family(
    "DeepseekV2ForCausalLM",
    (
        *rules.MODEL,
        *rules.LATENT_ATTENTION,
        *rules.DENSE_MLP,
        *rules.EXPERTS,
        *rules.SHARED_EXPERTS,
    ),
    read_deepseek_sizes,
    is_after_dense_layers,
    _make_v2_options,
    {
        **SETTINGS,
        "topk_method": ("greedy", "group_limited_greedy"),
        "scoring_func": ("softmax",),
        "norm_topk_prob": (False,),
    },
    rope_types=("default", "yarn"),
    refusal=lambda config: (
        find_group_refusal(config, scored_by=1) if config.get("topk_method") != "greedy" else ""
    ),
    explicit=("n_shared_experts", "q_lora_rank"),
)
