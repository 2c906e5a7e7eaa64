"""DeepSeek-V3 (also R1, Kimi-K2 and Moonlight), DeepSeek-V2, GLM-4.7-Flash, Kimi-K2.5, Kimi-VL.

All have latent attention, shared experts and dense first layers. V3 scores experts by sigmoid and
chooses them with a bias, as does GLM-4.7-Flash; V2 scores them by softmax. Kimi-VL is the language
model of DeepSeek-V3 behind the vision tower MoonViT:

    Megatron key                          HF name
    decoder.layers.{layer}.*          <-  language_model.model.layers.{layer}.*
    visual.blocks.{block}.wqkv.*      <-  vision_tower.encoder.blocks.{block}.wqkv.*
    visual.merger.linear_1.*          <-  multi_modal_projector.linear_1.*

Positions of tokens have one axis, for images, too (Kimi-VL, arXiv:2504.07491, section 2.1). Of
Kimi-K2.5 (also K2.6) only the language model is trained; exports get tower and projector unchanged.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_rl.weights.models import rules, tower
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
    need,
    read_base_sizes,
    read_latent_sizes,
    read_shared_expert_sizes,
)
from mcore_rl.weights.models.table import Family, HfConfig, HfTensor, Rule

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


LANGUAGE = "language_model."
VISUAL = "vision_tower."
BLOCKS = VISUAL + "encoder."
MERGER = "multi_modal_projector."
IMAGE_PARTS = r"(?:vision_tower|mm_projector)\..*"
"""HF names of the parts of Kimi-K2.5 that see images."""

MOONVIT_SETTINGS: Mapping[str, tuple[Any, ...]] = {"model_type": ("moonvit",), "patch_size": (14,)}
"""Key of vision_config -> the values that tower and engines support, besides absence."""
KIMI_VL_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    **DEEPSEEK_V3.supported,
    "tie_word_embeddings": (False,),
}
"""The same for config.json."""


def _make_rules(hf_name: str, key: str, *axes: str) -> tuple[Rule, Rule]:
    """Return the rules of weight and bias of a module outside the blocks."""
    weight = Rule(f"{key}.weight", (HfTensor(f"{hf_name}.weight", axes),), where="model")
    bias = Rule(f"{key}.bias", (HfTensor(f"{hf_name}.bias", axes[:1]),), where="model")
    return weight, bias


def _make_block_rules(name: str, *axes: str) -> tuple[Rule, Rule]:
    """Return the rules of weight and bias of a module of every block."""
    weight = tower.make_block_rule(f"{name}.weight", *axes, visual=BLOCKS)
    bias = tower.make_block_rule(f"{name}.bias", axes[0], visual=BLOCKS)
    return weight, bias


PATCHES = VISUAL + "patch_embed."
TOWER = (
    *_make_rules(
        PATCHES + "proj",
        tower.PREFIX + "patch_embed.proj",
        *("tower_hidden", "channels", "patch", "patch"),
    ),
    Rule(
        tower.PREFIX + "patch_embed.pos_emb.weight",
        (HfTensor(PATCHES + "pos_emb.weight", ("tower_rows", "tower_columns", "tower_hidden")),),
        where="model",
    ),
    *_make_block_rules("norm0", "tower_hidden"),
    *_make_block_rules("norm1", "tower_hidden"),
    *_make_block_rules("wqkv", "tower_qkv", "tower_hidden"),
    *_make_block_rules("wo", "tower_hidden", "tower_hidden"),
    *_make_block_rules("mlp.fc0", "tower_ffn", "tower_hidden"),
    *_make_block_rules("mlp.fc1", "tower_hidden", "tower_ffn"),
    *_make_rules(BLOCKS + "final_layernorm", tower.PREFIX + "final_layernorm", "tower_hidden"),
    *_make_rules(MERGER + "pre_norm", tower.PROJECTOR + "pre_norm", "tower_hidden"),
    *_make_rules(MERGER + "linear_1", tower.PROJECTOR + "linear_1", "merged", "merged"),
    *_make_rules(MERGER + "linear_2", tower.PROJECTOR + "linear_2", "hidden", "merged"),
)


def read_moonvit_sizes(config: HfConfig) -> dict[str, int]:
    """Return the sizes of MoonViT. Raises ValueError naming a key that vision_config lacks."""
    vision = tower.read_vision_settings(config)
    hidden = tower.need_for_tower(vision, "hidden_size")
    ffn = tower.need_for_tower(vision, "intermediate_size")
    return {
        "tower_blocks": tower.need_for_tower(vision, "num_hidden_layers"),
        "tower_hidden": hidden,
        "tower_qkv": 3 * hidden,
        "tower_heads": tower.need_for_tower(vision, "num_attention_heads"),
        "tower_ffn": ffn,
        "tower_block_ffn": ffn,
        "tower_rows": vision.get("init_pos_emb_height", 64),
        "tower_columns": vision.get("init_pos_emb_width", 64),
        "merged": hidden * tower.merge_size(config) ** 2,
        "channels": 3,
        "patch_frames": 1,
        "patch": vision.get("patch_size", 14),
    }


def read_kimi_vl_sizes(config: HfConfig) -> Mapping[str, int]:
    return {**read_deepseek_sizes(config), **read_moonvit_sizes(config)}


def find_kimi_vl_refusal(config: HfConfig) -> str:
    vision = tower.read_vision_settings(config)
    for key, values in MOONVIT_SETTINGS.items():
        if vision.get(key, values[0]) not in values:
            supported = " or ".join(map(repr, values))
            return f"{key}={vision[key]!r} of vision_config: only {supported} is supported"
    tower.merge_size(config)
    hidden = tower.need_for_tower(vision, "hidden_size")
    heads = tower.need_for_tower(vision, "num_attention_heads")
    if hidden % (4 * heads):
        return (
            f"hidden_size={hidden} and num_attention_heads={heads} of vision_config: two axes"
            " rotate pairs, so the width of a head must be a multiple of 4"
        )
    need(config, *tower.PLACEHOLDERS)
    return find_rope_theta_refusal(config) or DEEPSEEK_V3.refusal(config)


KIMI_K25 = Family(
    "KimiK25ForConditionalGeneration",
    tuple(tower.make_language_rules(LANGUAGE_RULES, old="", new=LANGUAGE)),
    read_deepseek_sizes,
    DEEPSEEK_V3.is_moe_layer,
    DEEPSEEK_V3.options,
    {**DEEPSEEK_V3.supported, "tie_word_embeddings": (False,)},
    rope_types=DEEPSEEK_V3.rope_types,
    refusal=lambda config: find_rope_theta_refusal(config) or DEEPSEEK_V3.refusal(config),
    explicit=DEEPSEEK_V3.explicit,
    carried=lambda config: rf"{_match_kimi_vl_carried(config)}|{IMAGE_PARTS}",
)


def _match_kimi_vl_carried(config: HfConfig) -> str:
    return rf"language_model\.(?:{DEEPSEEK_V3.carried(config)})"


KIMI_VL = Family(
    "KimiVLForConditionalGeneration",
    (*tower.make_language_rules(LANGUAGE_RULES, old="", new=LANGUAGE), *TOWER),
    read_kimi_vl_sizes,
    DEEPSEEK_V3.is_moe_layer,
    DEEPSEEK_V3.options,
    KIMI_VL_SETTINGS,
    refusal=find_kimi_vl_refusal,
    explicit=DEEPSEEK_V3.explicit,
    carried=_match_kimi_vl_carried,
)
