"""Kimi-VL and Kimi-K2.5 (also K2.6): DeepSeek-V3 behind the vision tower MoonViT.

    Megatron key                          Kimi-VL                            Kimi-K2.5
    decoder.layers.{layer}.*          <-  language_model.model.layers.{layer}.*
    visual.blocks.{block}.wqkv.*      <-  vision_tower.encoder.blocks.{block}.wqkv.*
    visual.merger.linear_1.*          <-  multi_modal_projector.linear_1.*   mm_projector.proj.0.*
    visual.merger.linear_2.*          <-  multi_modal_projector.linear_2.*   mm_projector.proj.2.*

Positions of tokens have one axis, for images, too (Kimi-VL, arXiv:2504.07491, section 2.1). The
tower of Kimi-K2.5 can also pool the frames of a video; of images it computes what Kimi-VL's does.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_rl.weights.models import tower
from mcore_rl.weights.models.deepseek import DEEPSEEK_V3, LANGUAGE_RULES, read_deepseek_sizes
from mcore_rl.weights.models.settings import find_rope_theta_refusal, need
from mcore_rl.weights.models.table import Family, HfConfig, HfTensor, Rule

LANGUAGE = "language_model."
VISUAL = "vision_tower."
BLOCKS = VISUAL + "encoder."
PLACEHOLDER = "media_placeholder_token_id"
TABLE = {"init_pos_emb_height": 64, "init_pos_emb_width": 64}
"""Sides of the table of positions that vision_config need not give."""

KIMI_VL_TOWER: Mapping[str, tuple[Any, ...]] = {"model_type": ("moonvit",), "patch_size": (14,)}
"""Key of Kimi-VL's vision_config -> the values that tower and engines support, besides absence."""
KIMI_K25_TOWER: Mapping[str, tuple[Any, ...]] = {
    "patch_size": (14,),
    "pos_emb_type": ("divided_fixed",),
    "merge_type": ("sd2_tpool",),
    "video_attn_type": ("spatial_temporal",),
    "mm_projector_type": ("patchmerger",),
    "projector_hidden_act": ("gelu",),
    "projector_ln_eps": (1e-5,),
}
"""The same for Kimi-K2.5."""
SETTINGS: Mapping[str, tuple[Any, ...]] = {
    **DEEPSEEK_V3.supported,
    "tie_word_embeddings": (False,),
}
"""The same for config.json of both."""


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


def _make_projector_rules(norm: str, first: str, second: str) -> tuple[Rule, ...]:
    """Return the rules of the projector, whose modules have these HF names."""
    return (
        *_make_rules(norm, tower.PROJECTOR + "pre_norm", "tower_hidden"),
        *_make_rules(first, tower.PROJECTOR + "linear_1", "merged", "merged"),
        *_make_rules(second, tower.PROJECTOR + "linear_2", "hidden", "merged"),
    )


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
)
KIMI_VL_PROJECTOR = _make_projector_rules(
    *(f"multi_modal_projector.{part}" for part in ("pre_norm", "linear_1", "linear_2"))
)
KIMI_K25_PROJECTOR = _make_projector_rules(
    *(f"mm_projector.{part}" for part in ("pre_norm", "proj.0", "proj.2"))
)


def read_moonvit_sizes(config: HfConfig, prefix: str = "") -> dict[str, int]:
    """Return the sizes of MoonViT. Raises ValueError naming a key that vision_config lacks.

    prefix   what the keys of its sizes begin with
    """
    vision = tower.read_vision_settings(config)
    hidden = tower.need_for_tower(vision, prefix + "hidden_size")
    ffn = tower.need_for_tower(vision, prefix + "intermediate_size")
    return {
        "tower_blocks": tower.need_for_tower(vision, prefix + "num_hidden_layers"),
        "tower_hidden": hidden,
        "tower_qkv": 3 * hidden,
        "tower_heads": tower.need_for_tower(vision, prefix + "num_attention_heads"),
        "tower_ffn": ffn,
        "tower_block_ffn": ffn,
        "tower_rows": tower.need_for_tower({**TABLE, **vision}, "init_pos_emb_height"),
        "tower_columns": tower.need_for_tower({**TABLE, **vision}, "init_pos_emb_width"),
        "merged": hidden * tower.merge_size(config) ** 2,
        "channels": 3,
        "patch_frames": 1,
        "patch": vision.get("patch_size", 14),
    }


def read_kimi_vl_sizes(config: HfConfig) -> Mapping[str, int]:
    return {**read_deepseek_sizes(config), **read_moonvit_sizes(config)}


def read_kimi_k25_sizes(config: HfConfig) -> Mapping[str, int]:
    return {**read_deepseek_sizes(config), **read_moonvit_sizes(config, "vt_")}


def _find_tower_refusal(
    config: HfConfig, settings: Mapping[str, tuple[Any, ...]], sizes: Mapping[str, int]
) -> str:
    """Return why the tower of config.json is not supported; "" if it is."""
    vision = tower.read_vision_settings(config)
    for key, values in settings.items():
        if vision.get(key, values[0]) not in values:
            supported = " or ".join(map(repr, values))
            return f"{key}={vision[key]!r} of vision_config: only {supported} is supported"
    hidden, heads = sizes["tower_hidden"], sizes["tower_heads"]
    if hidden % (4 * heads):
        return (
            f"a tower of width {hidden} with {heads} attention heads in vision_config: two axes"
            " rotate pairs, so the width of a head must be a multiple of 4"
        )
    placeholder = need(config, PLACEHOLDER)
    if not isinstance(placeholder, int) or not 0 <= placeholder < sizes["vocab"]:
        return (
            f"{PLACEHOLDER}={placeholder!r}: it should be one of the {sizes['vocab']} tokens of the"
            " vocabulary"
        )
    return find_rope_theta_refusal(config) or DEEPSEEK_V3.refusal(config)


def find_kimi_vl_refusal(config: HfConfig) -> str:
    return _find_tower_refusal(config, KIMI_VL_TOWER, read_kimi_vl_sizes(config))


def find_kimi_k25_refusal(config: HfConfig) -> str:
    sizes = read_kimi_k25_sizes(config)
    vision = tower.read_vision_settings(config)
    for key, size in (("mm_hidden_size", "tower_hidden"), ("text_hidden_size", "hidden")):
        if vision.get(key, sizes[size]) != sizes[size]:
            return f"{key}={vision[key]} of vision_config should be {sizes[size]}"
    return _find_tower_refusal(config, KIMI_K25_TOWER, sizes)


def _match_carried(config: HfConfig) -> str:
    return rf"language_model\.(?:{DEEPSEEK_V3.carried(config)})"


MODEL = (*tower.make_language_rules(LANGUAGE_RULES, old="", new=LANGUAGE), *TOWER)
KIMI_VL = Family(
    "KimiVLForConditionalGeneration",
    (*MODEL, *KIMI_VL_PROJECTOR),
    read_kimi_vl_sizes,
    DEEPSEEK_V3.is_moe_layer,
    DEEPSEEK_V3.options,
    SETTINGS,
    refusal=find_kimi_vl_refusal,
    explicit=DEEPSEEK_V3.explicit,
    carried=_match_carried,
)
KIMI_K25 = replace(
    KIMI_VL,
    architecture="KimiK25ForConditionalGeneration",
    rules=(*MODEL, *KIMI_K25_PROJECTOR),
    sizes=read_kimi_k25_sizes,
    rope_types=DEEPSEEK_V3.rope_types,
    refusal=find_kimi_k25_refusal,
)
