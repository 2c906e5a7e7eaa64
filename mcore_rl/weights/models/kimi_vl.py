"""Kimi-VL: the language model of DeepSeek-V3 behind the vision tower MoonViT.

    Megatron key                          HF name
    decoder.layers.{layer}.*          <-  language_model.model.layers.{layer}.*
    visual.blocks.{block}.wqkv.*      <-  vision_tower.encoder.blocks.{block}.wqkv.*
    visual.merger.linear_1.*          <-  multi_modal_projector.linear_1.*

Positions of tokens have one axis, for images, too (Kimi-VL, arXiv:2504.07491, section 2.1).
"""

from collections.abc import Mapping
from typing import Any

from mcore_rl.weights.models import deepseek, tower
from mcore_rl.weights.models.settings import need, rope_theta_refusal
from mcore_rl.weights.models.table import Family, HfConfig, HfTensor, Rule

LANGUAGE = "language_model."
VISUAL = "vision_tower."
BLOCKS = VISUAL + "encoder."
MERGER = "multi_modal_projector."

OF_TOWER: Mapping[str, tuple[Any, ...]] = {"model_type": ("moonvit",), "patch_size": (14,)}
"""Key of vision_config -> the values that tower and engines support, besides absence."""
OF_LANGUAGE: Mapping[str, tuple[Any, ...]] = {
    **deepseek.V3.supported,
    "tie_word_embeddings": (False,),
}
"""The same for config.json."""


def _rules(hf_name: str, key: str, *axes: str) -> tuple[Rule, Rule]:
    """Return the rules of weight and bias of a module outside the blocks."""
    weight = Rule(f"{key}.weight", (HfTensor(f"{hf_name}.weight", axes),), where="model")
    bias = Rule(f"{key}.bias", (HfTensor(f"{hf_name}.bias", axes[:1]),), where="model")
    return weight, bias


def _block_rules(name: str, *axes: str) -> tuple[Rule, Rule]:
    """Return the rules of weight and bias of a module of every block."""
    weight = tower.block_rule(f"{name}.weight", *axes, visual=BLOCKS)
    bias = tower.block_rule(f"{name}.bias", axes[0], visual=BLOCKS)
    return weight, bias


PATCHES = VISUAL + "patch_embed."
TOWER = (
    *_rules(
        PATCHES + "proj",
        tower.PREFIX + "patch_embed.proj",
        *("tower_hidden", "channels", "patch", "patch"),
    ),
    Rule(
        tower.PREFIX + "patch_embed.pos_emb.weight",
        (HfTensor(PATCHES + "pos_emb.weight", ("tower_rows", "tower_columns", "tower_hidden")),),
        where="model",
    ),
    *_block_rules("norm0", "tower_hidden"),
    *_block_rules("norm1", "tower_hidden"),
    *_block_rules("wqkv", "tower_qkv", "tower_hidden"),
    *_block_rules("wo", "tower_hidden", "tower_hidden"),
    *_block_rules("mlp.fc0", "tower_ffn", "tower_hidden"),
    *_block_rules("mlp.fc1", "tower_hidden", "tower_ffn"),
    *_rules(BLOCKS + "final_layernorm", tower.PREFIX + "final_layernorm", "tower_hidden"),
    *_rules(MERGER + "pre_norm", tower.PROJECTOR + "pre_norm", "tower_hidden"),
    *_rules(MERGER + "linear_1", tower.PROJECTOR + "linear_1", "merged", "merged"),
    *_rules(MERGER + "linear_2", tower.PROJECTOR + "linear_2", "hidden", "merged"),
)


def tower_sizes(config: HfConfig) -> dict[str, int]:
    """Return the sizes of MoonViT. Raises ValueError naming a key that vision_config lacks."""
    vision = tower.vision_settings(config)
    hidden = tower.need_of_tower(vision, "hidden_size")
    ffn = tower.need_of_tower(vision, "intermediate_size")
    return {
        "tower_blocks": tower.need_of_tower(vision, "num_hidden_layers"),
        "tower_hidden": hidden,
        "tower_qkv": 3 * hidden,
        "tower_heads": tower.need_of_tower(vision, "num_attention_heads"),
        "tower_ffn": ffn,
        "tower_block_ffn": ffn,
        "tower_rows": vision.get("init_pos_emb_height", 64),
        "tower_columns": vision.get("init_pos_emb_width", 64),
        "merged": hidden * tower.merge_size(config) ** 2,
        "channels": 3,
        "patch_frames": 1,
        "patch": vision.get("patch_size", 14),
    }


def sizes(config: HfConfig) -> Mapping[str, int]:
    return {**deepseek.sizes(config), **tower_sizes(config)}


def refusal(config: HfConfig) -> str:
    vision = tower.vision_settings(config)
    for key, values in OF_TOWER.items():
        if vision.get(key, values[0]) not in values:
            supported = " or ".join(map(repr, values))
            return f"{key}={vision[key]!r} of vision_config: only {supported} is supported"
    tower.merge_size(config)
    hidden = tower.need_of_tower(vision, "hidden_size")
    heads = tower.need_of_tower(vision, "num_attention_heads")
    if hidden % (4 * heads):
        return (
            f"hidden_size={hidden} and num_attention_heads={heads} of vision_config: two axes"
            " rotate pairs, so the width of a head must be a multiple of 4"
        )
    need(config, *tower.PLACEHOLDERS)
    return rope_theta_refusal(config) or deepseek.V3.refusal(config)


def _carried(config: HfConfig) -> str:
    return rf"language_model\.(?:{deepseek.V3.carried(config)})"


FAMILY = Family(
    "KimiVLForConditionalGeneration",
    (*tower.language_rules(deepseek.V3.rules, old="", new=LANGUAGE), *TOWER),
    sizes,
    deepseek.V3.is_moe_layer,
    deepseek.V3.options,
    OF_LANGUAGE,
    refusal=refusal,
    explicit=deepseek.V3.explicit,
    carried=_carried,
)
