"""GLM-4.5V: the language model of GLM-4.5 with a rotary embedding of three axes, and a tower.

    Megatron key                          HF name
    decoder.layers.{layer}.*          <-  model.language_model.layers.{layer}.*
    visual.blocks.{block}.attn.qkv.*  <-  model.visual.blocks.{block}.attn.qkv.*

Time, height and width of a position rotate parts of the first half of each head (arXiv:2507.01006,
section 2.1). A block's MLP is as wide as the language model; a learned table of positions is
interpolated to the size of each image.
"""

from collections.abc import Mapping
from typing import Any

from mcore_rl.weights.models import glm4_moe, tower
from mcore_rl.weights.models.settings import group_refusal, need, partial_rotary_share, rope_of
from mcore_rl.weights.models.table import Family, HfConfig, Rule


def _block(name: str, *axes: str) -> Rule:
    return tower.block_rule(name, *axes, visual=tower.VISUAL)


def _tower(name: str, *axes: str) -> Rule:
    return tower.tower_rule(name, *axes, visual=tower.VISUAL)


TOWER = (
    _tower(
        "patch_embed.proj.weight",
        *("tower_hidden", "channels", "patch_frames", "patch", "patch"),
    ),
    _tower("patch_embed.proj.bias", "tower_hidden"),
    _tower("embeddings.position_embedding.weight", "tower_positions", "tower_hidden"),
    _tower("post_conv_layernorm.weight", "tower_hidden"),
    _block("norm1.weight", "tower_hidden"),
    _block("norm2.weight", "tower_hidden"),
    _block("attn.qkv.weight", "tower_qkv", "tower_hidden"),
    _block("attn.qkv.bias", "tower_qkv_bias"),
    _block("attn.proj.weight", "tower_hidden", "tower_hidden"),
    _block("mlp.gate_proj.weight", "hidden", "tower_hidden"),
    _block("mlp.up_proj.weight", "hidden", "tower_hidden"),
    _block("mlp.down_proj.weight", "tower_hidden", "hidden"),
    _tower("post_layernorm.weight", "tower_hidden"),
    _tower("downsample.weight", "hidden", "tower_hidden", "merge", "merge"),
    _tower("downsample.bias", "hidden"),
    _tower("merger.proj.weight", "hidden", "hidden"),
    _tower("merger.post_projection_norm.weight", "hidden"),
    _tower("merger.post_projection_norm.bias", "hidden"),
    _tower("merger.gate_proj.weight", "tower_ffn", "hidden"),
    _tower("merger.up_proj.weight", "tower_ffn", "hidden"),
    _tower("merger.down_proj.weight", "hidden", "tower_ffn"),
)


def sizes(config: HfConfig) -> Mapping[str, int]:
    vision = tower.vision_settings(config)
    of_tower = tower.tower_sizes(config)
    side = vision.get("image_size", 336) // of_tower["patch"]
    return {
        **glm4_moe.sizes(config),
        **of_tower,
        "tower_block_ffn": need(config, "hidden_size"),
        "tower_positions": side**2,
        "tower_qkv_bias": of_tower["tower_qkv"] if vision.get("attention_bias") else 0,
        "merge": vision.get("spatial_merge_size", 2),
    }


def options(config: HfConfig) -> dict[str, Any]:
    return {
        **glm4_moe.options(config),
        "mrope_section": list(need(rope_of(config), "mrope_section")),
    }


def _rotary_share(config: HfConfig) -> float:
    return partial_rotary_share(config, default=0.5)


def refusal(config: HfConfig) -> str:
    rotated = int(sizes(config)["head"] * _rotary_share(config))
    return (
        group_refusal(config, scored_by=2)
        or tower.section_refusal(config, rotated)
        or tower.tower_refusal(config)
    )


FAMILY = Family(
    "Glm4vMoeForConditionalGeneration",
    (*tower.language_rules(glm4_moe.FAMILY.rules), *TOWER),
    sizes,
    glm4_moe.FAMILY.is_moe_layer,
    options,
    {**glm4_moe.FAMILY.supported, "use_qk_norm": (False,)},
    rope_types=("default", "mrope"),
    refusal=refusal,
    rotary_share=_rotary_share,
    explicit=glm4_moe.FAMILY.explicit,
    tied={"lm_head.weight": tower.LANGUAGE + "embed_tokens.weight"},
)
