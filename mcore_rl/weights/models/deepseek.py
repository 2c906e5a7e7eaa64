"""DeepSeek-V3 (also R1, Kimi-K2 and Moonlight) and DeepSeek-V2.

Both have latent attention, shared experts and dense first layers. V3 scores experts by sigmoid and
chooses them with a bias; V2 scores them by softmax.
"""

from collections.abc import Mapping
from typing import Any

from mcore_rl.weights.models import rules
from mcore_rl.weights.models.settings import (
    BIASED_SIGMOID,
    PLAIN_SETTINGS,
    after_dense_layers,
    base_options,
    base_sizes,
    group_refusal,
    latent_options,
    latent_sizes,
    mtp_names,
    shared_expert_options,
    shared_expert_sizes,
)
from mcore_rl.weights.models.table import Family, HfConfig

SETTINGS = {**PLAIN_SETTINGS, "rope_interleave": (True,), "moe_layer_freq": (1,)}
FREQUENCIES = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
"""Names of rotary frequencies, which the files of Moonlight and Kimi-VL have in every layer."""


def _carried(config: HfConfig) -> str:
    return "|".join(filter(None, (mtp_names(config), FREQUENCIES)))


def sizes(config: HfConfig) -> Mapping[str, int]:
    return {**base_sizes(config), **latent_sizes(config), **shared_expert_sizes(config)}


def _options(config: HfConfig) -> dict[str, Any]:
    return {
        **base_options(config),
        **latent_options(config),
        **shared_expert_options(config, sizes(config)),
    }


def _v3_options(config: HfConfig) -> dict[str, Any]:
    return {**_options(config), **BIASED_SIGMOID}


def _v2_options(config: HfConfig) -> dict[str, Any]:
    return {**_options(config), "moe_router_pre_softmax": True}


V3 = Family(
    "DeepseekV3ForCausalLM",
    (
        *rules.MODEL,
        *rules.LATENT_ATTENTION,
        *rules.DENSE_MLP,
        *rules.EXPERTS,
        rules.expert_bias("mlp.gate.e_score_correction_bias"),
        *rules.SHARED_EXPERTS,
    ),
    sizes,
    after_dense_layers,
    _v3_options,
    {
        **SETTINGS,
        "topk_method": ("noaux_tc",),
        "scoring_func": ("sigmoid",),
        "norm_topk_prob": (True,),
    },
    rope_types=("default", "yarn"),
    refusal=lambda config: group_refusal(config, scored_by=2),
    carried=_carried,
    explicit=(
        "first_k_dense_replace",
        "n_group",
        "n_shared_experts",
        "q_lora_rank",
        "routed_scaling_factor",
    ),
)

V2 = Family(
    "DeepseekV2ForCausalLM",
    (
        *rules.MODEL,
        *rules.LATENT_ATTENTION,
        *rules.DENSE_MLP,
        *rules.EXPERTS,
        *rules.SHARED_EXPERTS,
    ),
    sizes,
    after_dense_layers,
    _v2_options,
    {
        **SETTINGS,
        "topk_method": ("greedy", "group_limited_greedy"),
        "scoring_func": ("softmax",),
        "norm_topk_prob": (False,),
    },
    rope_types=("default", "yarn"),
    refusal=lambda config: (
        group_refusal(config, scored_by=1) if config.get("topk_method") != "greedy" else ""
    ),
    explicit=("n_shared_experts", "q_lora_rank"),
)
