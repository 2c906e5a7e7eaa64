"""GLM-4.5, GLM-4.6 and MiniMax-M2, and GLM-4.5V, which sees images.

The rotary embedding rotates a part of each head, half of it in GLM-4.5, and experts are chosen with
a bias. MiniMax-M2 normalizes queries and keys over all heads together. In GLM-4.5 some experts are
shared, and the first layers are dense. GLM-4.5V is the language model of GLM-4.5 with a rotary
embedding of three axes, and a tower:

    Megatron key                          HF name
    decoder.layers.{layer}.*          <-  model.language_model.layers.{layer}.*
    visual.blocks.{block}.attn.qkv.*  <-  model.visual.blocks.{block}.attn.qkv.*

Time, height and width of a position rotate parts of the first half of each head (arXiv:2507.01006,
section 2.1). A block's MLP is as wide as the language model; a learned table of positions is
interpolated to the size of each image.
"""

from collections.abc import Mapping
from typing import Any

from mcore_rl.weights.models import rules, tower
from mcore_rl.weights.models.mtp import BEHIND_LAYERS, list_copies, make_mtp_rules
from mcore_rl.weights.models.settings import (
    BIASED_SIGMOID,
    PLAIN_SETTINGS,
    find_group_refusal,
    find_rope_theta_refusal,
    is_after_dense_layers,
    is_any_layer,
    make_base_options,
    make_expert_options,
    make_grouped_query_options,
    make_shared_expert_options,
    match_mtp_names,
    need,
    read_base_sizes,
    read_grouped_query_sizes,
    read_rope,
    read_rotary_share,
    read_shared_expert_sizes,
)
from mcore_rl.weights.models.table import Family, HfConfig, Rule


def read_glm4_sizes(config: HfConfig) -> Mapping[str, int]:
    attention = read_grouped_query_sizes(
        config,
        qk_norm="head" if config.get("use_qk_norm") else "none",
        qkv_bias=config.get("attention_bias", False),
    )
    return {**read_base_sizes(config), **attention, **read_shared_expert_sizes(config)}


def make_glm4_options(config: HfConfig) -> dict[str, Any]:
    return {
        **make_base_options(config),
        **make_grouped_query_options(read_glm4_sizes(config)),
        **make_shared_expert_options(config, read_glm4_sizes(config)),
        **BIASED_SIGMOID,
    }


MOE_LAYER = (
    *rules.GROUPED_QUERY_ATTENTION,
    *rules.EXPERTS,
    rules.make_expert_bias_rule("mlp.gate.e_score_correction_bias"),
    *rules.SHARED_EXPERTS,
)
GLM4_RULES = (*rules.MODEL, *rules.DENSE_MLP, *MOE_LAYER)

GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    (*GLM4_RULES, *make_mtp_rules(MOE_LAYER, BEHIND_LAYERS)),
    read_glm4_sizes,
    is_after_dense_layers,
    make_glm4_options,
    {**PLAIN_SETTINGS, "attention_bias": (False, True), "norm_topk_prob": (True,)},
    refusal=lambda config: find_group_refusal(config, scored_by=2),
    explicit=("num_key_value_heads", "first_k_dense_replace", "n_shared_experts"),
    carried=match_mtp_names,
    copies=list_copies,
    rotary_share=lambda config: read_rotary_share(config, default=0.5),
)


def _make_block_rule(name: str, *axes: str) -> Rule:
    return tower.make_block_rule(name, *axes, visual=tower.VISUAL)


def _make_tower_rule(name: str, *axes: str) -> Rule:
    return tower.make_tower_rule(name, *axes, visual=tower.VISUAL)


TOWER = (
    _make_tower_rule(
        "patch_embed.proj.weight",
        *("tower_hidden", "channels", "patch_frames", "patch", "patch"),
    ),
    _make_tower_rule("patch_embed.proj.bias", "tower_hidden"),
    _make_tower_rule("embeddings.position_embedding.weight", "tower_positions", "tower_hidden"),
    _make_tower_rule("post_conv_layernorm.weight", "tower_hidden"),
    _make_block_rule("norm1.weight", "tower_hidden"),
    _make_block_rule("norm2.weight", "tower_hidden"),
    _make_block_rule("attn.qkv.weight", "tower_qkv", "tower_hidden"),
    _make_block_rule("attn.qkv.bias", "tower_qkv_bias"),
    _make_block_rule("attn.proj.weight", "tower_hidden", "tower_hidden"),
    _make_block_rule("mlp.gate_proj.weight", "hidden", "tower_hidden"),
    _make_block_rule("mlp.up_proj.weight", "hidden", "tower_hidden"),
    _make_block_rule("mlp.down_proj.weight", "tower_hidden", "hidden"),
    _make_tower_rule("post_layernorm.weight", "tower_hidden"),
    _make_tower_rule("downsample.weight", "hidden", "tower_hidden", "merge", "merge"),
    _make_tower_rule("downsample.bias", "hidden"),
    _make_tower_rule("merger.proj.weight", "hidden", "hidden"),
    _make_tower_rule("merger.post_projection_norm.weight", "hidden"),
    _make_tower_rule("merger.post_projection_norm.bias", "hidden"),
    _make_tower_rule("merger.gate_proj.weight", "tower_ffn", "hidden"),
    _make_tower_rule("merger.up_proj.weight", "tower_ffn", "hidden"),
    _make_tower_rule("merger.down_proj.weight", "hidden", "tower_ffn"),
)


def read_glm4v_sizes(config: HfConfig) -> Mapping[str, int]:
    vision = tower.read_vision_settings(config)
    of_tower = tower.read_tower_sizes(config)
    side = vision.get("image_size", 336) // of_tower["patch"]
    return {
        **read_glm4_sizes(config),
        **of_tower,
        "tower_block_ffn": need(config, "hidden_size"),
        "tower_positions": side**2,
        "tower_qkv_bias": of_tower["tower_qkv"] if vision.get("attention_bias") else 0,
        "merge": vision.get("spatial_merge_size", 2),
    }


def make_glm4v_options(config: HfConfig) -> dict[str, Any]:
    return {
        **make_glm4_options(config),
        "mrope_section": list(need(read_rope(config), "mrope_section")),
    }


def _read_glm4_rotary_share(config: HfConfig) -> float:
    return read_rotary_share(config, default=0.5)


def find_glm4v_refusal(config: HfConfig) -> str:
    rotated = int(read_glm4v_sizes(config)["head"] * _read_glm4_rotary_share(config))
    return (
        find_group_refusal(config, scored_by=2)
        or tower.find_section_refusal(config, rotated)
        or tower.find_tower_refusal(config)
    )


GLM4V_MOE = Family(
    "Glm4vMoeForConditionalGeneration",
    (*tower.make_language_rules(GLM4_RULES), *TOWER),
    read_glm4v_sizes,
    GLM4_MOE.is_moe_layer,
    make_glm4v_options,
    {**GLM4_MOE.supported, "use_qk_norm": (False,)},
    rope_types=("default", "mrope"),
    refusal=find_glm4v_refusal,
    rotary_share=_read_glm4_rotary_share,
    explicit=GLM4_MOE.explicit,
    tied={"lm_head.weight": tower.LANGUAGE + "embed_tokens.weight"},
)


def read_minimax_sizes(config: HfConfig) -> Mapping[str, int]:
    return {
        **read_base_sizes(config),
        **read_grouped_query_sizes(config, qk_norm="projection"),
        "experts": need(config, "num_local_experts", "num_experts"),
        "expert_ffn": need(config, "intermediate_size"),
    }


def make_minimax_options(config: HfConfig) -> dict[str, Any]:
    return {
        **make_base_options(config),
        **make_grouped_query_options(read_minimax_sizes(config)),
        **make_expert_options(config, read_minimax_sizes(config)),
        **BIASED_SIGMOID,
    }


def _find_minimax_refusal(config: HfConfig) -> str:
    if any(kind != 1 for kind in config.get("attn_type_list") or ()):
        return "attn_type_list has kinds of attention other than 1, softmax attention"
    return find_rope_theta_refusal(config)


def _read_minimax_rotary_share(config: HfConfig) -> float:
    head = read_minimax_sizes(config)["head"]
    rotated = config.get("rotary_dim") or head
    return read_rotary_share(config, default=rotated / head)


MINIMAX_M2 = Family(
    "MiniMaxM2ForCausalLM",
    (
        *rules.MODEL,
        *rules.GROUPED_QUERY_ATTENTION,
        *rules.NUMBERED_EXPERTS,
        rules.make_expert_bias_rule("block_sparse_moe.e_score_correction_bias"),
    ),
    read_minimax_sizes,
    is_any_layer,
    make_minimax_options,
    {
        **PLAIN_SETTINGS,
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),
        "use_routing_bias": (True,),
        "scoring_func": ("sigmoid",),
        "shared_intermediate_size": (0,),
    },
    refusal=_find_minimax_refusal,
    rotary_share=_read_minimax_rotary_share,
    explicit=("num_key_value_heads", "head_dim"),
)
