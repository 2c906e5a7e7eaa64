"""Qwen2.5-VL, and Qwen3-VL and Qwen3.5, dense and with experts: language models and towers.

Qwen2.5-VL is the language model of Qwen2 with a rotary embedding of three axes: time, height and
width of a position rotate parts of each head of their own, whose sizes `mrope_section` gives
(Qwen2-VL, arXiv:2409.12191, section 2.1). Qwen3-VL is that of Qwen3, and its tower has several
depths:

    Megatron key                              HF name
    decoder.layers.{layer}.*              <-  model.language_model.layers.{layer}.*
    visual.deepstack_merger_list.{k}.*    <-  model.visual.deepstack_merger_list.{k}.*

Time, height and width of a position rotate the frequencies of each head in turn (T H W T H W ...).
The features of inner blocks of the tower, each with a projector of its own, are added to the hidden
states of images behind the first language layers (DeepStack, arXiv:2406.04334, section 3).

The published files of Qwen3-VL stack all experts of a layer in one HF tensor, each transposed, gate
columns before those of up. transformers always normalizes the weights of a token's experts.

Qwen3.5 has the tower of Qwen3-VL without features of inner blocks. Its language model has gated
delta nets (qwen_delta_net.py), its rotary embedding takes turns over a quarter of each head, and
its experts are stacked as Megatron has them, gate rows before those of up.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from mcore_rl.weights.models import rules, tower
from mcore_rl.weights.models.qwen_delta_net import QWEN3_5, QWEN3_5_MOE
from mcore_rl.weights.models.qwen_llama_mixtral import QWEN3, QWEN3_MOE, has_no_experts
from mcore_rl.weights.models.settings import (
    PLAIN_SETTINGS,
    find_rope_theta_refusal,
    make_base_options,
    make_grouped_query_options,
    need,
    read_base_sizes,
    read_grouped_query_sizes,
    read_rope,
)
from mcore_rl.weights.models.table import Family, HfConfig, HfTensor, Rule


def _read_qwen2_5_vl_sizes(config: HfConfig) -> Mapping[str, int]:
    attention = read_grouped_query_sizes(config, qkv_bias=True)
    return {**read_base_sizes(config), **attention, **tower.read_tower_sizes(config)}


def make_qwen2_5_vl_options(config: HfConfig) -> dict[str, Any]:
    return {
        **make_base_options(config),
        **make_grouped_query_options(_read_qwen2_5_vl_sizes(config)),
        "mrope_section": list(need(read_rope(config), "mrope_section")),
    }


def find_qwen2_5_vl_refusal(config: HfConfig) -> str:
    return tower.find_section_refusal(
        config, _read_qwen2_5_vl_sizes(config)["head"]
    ) or tower.find_tower_refusal(config)


QWEN2_5_VL = Family(
    "Qwen2_5_VLForConditionalGeneration",
    (*rules.MODEL, *rules.GROUPED_QUERY_ATTENTION, *rules.DENSE_MLP, *tower.RULES),
    _read_qwen2_5_vl_sizes,
    has_no_experts,
    make_qwen2_5_vl_options,
    PLAIN_SETTINGS,
    rope_types=("default", "mrope"),
    refusal=find_qwen2_5_vl_refusal,
    explicit=("num_key_value_heads",),
)


PATCH = 16
POSITIONS = 2304
"""Sizes of transformers' tower if vision_config does not give them."""
TOWER_THETA = 10000.0
"""Base of the tower's rotary frequencies, built into SGLang."""
Sizes = Callable[[HfConfig], Mapping[str, int]]


def _make_rule(name: str, *axes: str, where: Any = "model") -> Rule:
    """Return the rule of a tensor of the tower; in numbered modules "{layer}" is the number."""
    key = tower.PREFIX + name.replace("{layer}.", "")
    return Rule(key, (HfTensor(tower.VISUAL + name, axes),), where=where)


def _make_linear(module: str, rows: str, columns: str, where: Any) -> tuple[Rule, Rule]:
    """Return the rules of weight and bias of a linear layer."""
    weight = _make_rule(f"{module}.weight", rows, columns, where=where)
    return weight, _make_rule(f"{module}.bias", rows, where=where)


def _make_norm(module: str, width: str, where: Any) -> tuple[Rule, Rule]:
    """Return the rules of weight and bias of a norm."""
    weight = _make_rule(f"{module}.weight", width, where=where)
    return weight, _make_rule(f"{module}.bias", width, where=where)


def _make_merger(module: str, norm: str, where: Any) -> tuple[Rule, ...]:
    """Return the rules of a projector, whose norm has the width `norm`."""
    return (
        *_make_norm(f"{module}norm", norm, where),
        *_make_linear(f"{module}linear_fc1", "merged", "merged", where),
        *_make_linear(f"{module}linear_fc2", "hidden", "merged", where),
    )


BLOCK = "blocks.{layer}."
TOWER = (
    _make_rule(
        "patch_embed.proj.weight",
        *("tower_hidden", "channels", "patch_frames", "patch", "patch"),
    ),
    _make_rule("patch_embed.proj.bias", "tower_hidden"),
    _make_rule("pos_embed.weight", "tower_positions", "tower_hidden"),
    *_make_norm(BLOCK + "norm1", "tower_hidden", "tower"),
    *_make_norm(BLOCK + "norm2", "tower_hidden", "tower"),
    *_make_linear(BLOCK + "attn.qkv", "tower_qkv", "tower_hidden", "tower"),
    *_make_linear(BLOCK + "attn.proj", "tower_hidden", "tower_hidden", "tower"),
    *_make_linear(BLOCK + "mlp.linear_fc1", "tower_ffn", "tower_hidden", "tower"),
    *_make_linear(BLOCK + "mlp.linear_fc2", "tower_hidden", "tower_ffn", "tower"),
    *_make_merger("merger.", "tower_hidden", "model"),
)
INNER_PROJECTORS = _make_merger("deepstack_merger_list.{layer}.", "merged", "deepstack")


def _make_stacked(module: str, name: str, *axes: str, **more: Any) -> Rule:
    """Return the rule of an HF tensor that stacks all experts; `axes` are those of one expert."""
    tensor = HfTensor(f"{rules.HF_LAYER}mlp.experts.{name}", ("experts", *axes))
    key = f"{rules.LAYER}mlp.experts.experts.{module}.weight"
    return Rule(key, (tensor,), "moe", stacked=True, **more)


EXPERTS = (
    _make_stacked("linear_fc1", "gate_up_proj", "hidden", "gate_up", halves=True),
    _make_stacked("linear_fc2", "down_proj", "expert_ffn", "hidden"),
)
UPRIGHT_EXPERTS = (
    _make_stacked("linear_fc1", "gate_up_proj", "gate_up", "hidden", halves=True, upright=True),
    _make_stacked("linear_fc2", "down_proj", "hidden", "expert_ffn", upright=True),
)


def _stack_experts(rules_of_text: Iterable[Rule], experts: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Return the rules of a language model with `experts` in place of its rules of experts."""
    return (*(rule for rule in rules_of_text if not rule.has_expert_axis), *experts)


def _read_sizes(config: HfConfig, *, text: Sizes, has_inner: bool) -> Mapping[str, int]:
    vision = tower.read_vision_settings(config)
    need(config, "head_dim")  # transformers' own defaults differ between the two models
    text_sizes = text(config)
    return {
        **text_sizes,
        "gate_up": 2 * text_sizes["expert_ffn"],
        **tower.read_tower_sizes(config),
        "patch": vision.get("patch_size", PATCH),
        "tower_positions": vision.get("num_position_embeddings", POSITIONS),
        "deepstack_mergers": len(_read_depths(config)) if has_inner else 0,
    }


def _make_options(
    config: HfConfig, *, text: Callable[[HfConfig], dict[str, Any]]
) -> dict[str, Any]:
    return {**text(config), "mrope_section": list(need(read_rope(config), "mrope_section"))}


def _read_depths(config: HfConfig) -> list[int]:
    """Return the tower's blocks whose features the first language layers get, in their order."""
    depths = tower.read_vision_settings(config).get("deepstack_visual_indexes")
    if depths is None:
        raise ValueError("vision_config of config.json lacks 'deepstack_visual_indexes'")
    return list(depths)


def _find_refusal(config: HfConfig, *, text: Family, sizes: Sizes, has_inner: bool) -> str:
    rotated = int(sizes(config)["head"] * text.rotary_share(config))
    return (
        text.refusal(config)
        or find_rope_theta_refusal(config)
        or (_find_experts_refusal(config, sizes(config)) if has_inner else "")
        or tower.find_section_refusal(config, rotated)
        or _find_interleaving_refusal(config, rotated)
        or tower.find_tower_refusal(config)
        or (_find_depths_refusal(config) if has_inner else _find_inner_refusal(config))
        or _find_tower_refusal(config)
    )


def _find_experts_refusal(config: HfConfig, sizes: Mapping[str, int]) -> str:
    """Return why the experts' matrices are ambiguous; "" if they are not."""
    if sizes["hidden"] in (sizes["gate_up"], sizes["expert_ffn"]):
        return (
            f"moe_intermediate_size={config['moe_intermediate_size']} makes a square of an expert's"
            f" matrix with hidden_size={config['hidden_size']}: by shape, transformers could not"
            " tell how it lies in the file"
        )
    return ""


def _find_interleaving_refusal(config: HfConfig, rotated: int) -> str:
    """Return why the axes cannot take turns over the frequencies of a head; "" if they can."""
    rope = read_rope(config)
    if rope.get("mrope_interleaved") is not True:
        value = rope.get("mrope_interleaved")
        return (
            f"mrope_interleaved={value!r}: transformers always interleaves the axes of this family,"
            " SGLang only if its rotary settings say true"
        )
    section = rope["mrope_section"]
    if len(section) != 3 or any(axis + 3 * (section[axis] - 1) >= rotated // 2 for axis in (1, 2)):
        return (
            f"mrope_section={section}: height and width each get every third of the {rotated // 2}"
            " frequencies of a head at most"
        )
    return ""


def _find_inner_refusal(config: HfConfig) -> str:
    """Return why features of inner blocks cannot be given to a model without them, or ""."""
    depths = tower.read_vision_settings(config).get("deepstack_visual_indexes")
    if depths:
        return f"deepstack_visual_indexes={depths}: transformers has no such features in it"
    return ""


def _find_depths_refusal(config: HfConfig) -> str:
    """Return why there are no such inner blocks; "" if there are."""
    depths = _read_depths(config)
    blocks = range(tower.read_vision_settings(config)["depth"])
    if sorted(set(depths)) != depths or not set(depths) <= set(blocks):
        return (
            f"deepstack_visual_indexes={depths} should be rising numbers of the {len(blocks)}"
            " blocks of vision_config"
        )
    if len(depths) > need(config, "num_hidden_layers"):
        return (
            f"deepstack_visual_indexes={depths} are more than the"
            f" {config['num_hidden_layers']} layers of the language model"
        )
    return ""


def _find_tower_refusal(config: HfConfig) -> str:
    """Return why transformers' tower differs from what the settings say; "" if it does not."""
    vision = tower.read_vision_settings(config)
    positions = vision.get("num_position_embeddings", POSITIONS)
    if int(positions**0.5) ** 2 != positions:
        return f"num_position_embeddings={positions} should be the square of a number"
    theta = (vision.get("rope_parameters") or {}).get("rope_theta", TOWER_THETA)
    if theta != TOWER_THETA:
        return f"rope_theta={theta} of vision_config: SGLang has {TOWER_THETA:g} built in"
    return ""


def _make_family(
    text: Family,
    rules_of_text: tuple[Rule, ...],
    architecture: str,
    inner_projectors: tuple[Rule, ...] = INNER_PROJECTORS,
    **more: Any,
) -> Family:
    """Return the family whose language model is `text`, with these rules of what can be trained.

    inner_projectors   rules of the projectors of inner blocks' features, if the tower has any
    """
    has_inner = bool(inner_projectors)
    policy = [rule for rule in rules_of_text if rule.where != "mtp"]
    sizes = partial(_read_sizes, text=text.sizes, has_inner=has_inner)
    options: dict[str, Any] = {
        "architecture": architecture,
        "rules": (*tower.make_language_rules(policy), *TOWER, *inner_projectors),
        "sizes": sizes,
        "options": partial(_make_options, text=text.options),
        "rope_types": ("default", "mrope"),
        "refusal": partial(_find_refusal, text=text, sizes=sizes, has_inner=has_inner),
        "tied": {"lm_head.weight": tower.LANGUAGE + "embed_tokens.weight"},
    }
    return replace(text, **options | more)


def _normalize_choices(config: HfConfig) -> dict[str, Any]:
    """Return the options of Qwen3-MoE whose router always normalizes a token's weights."""
    return {**QWEN3_MOE.options(config), "moe_router_pre_softmax": False}


QWEN3_VL = _make_family(QWEN3, QWEN3.rules, "Qwen3VLForConditionalGeneration")
QWEN3_VL_MOE = _make_family(
    replace(QWEN3_MOE, options=_normalize_choices),
    _stack_experts(QWEN3_MOE.rules, EXPERTS),
    "Qwen3VLMoeForConditionalGeneration",
    supported={**QWEN3_MOE.supported, "norm_topk_prob": (True,)},
)
QWEN3_5_VL = _make_family(QWEN3_5, QWEN3_5.rules, "Qwen3_5ForConditionalGeneration", ())
QWEN3_5_VL_MOE = _make_family(
    QWEN3_5_MOE,
    _stack_experts(QWEN3_5_MOE.rules, UPRIGHT_EXPERTS),
    "Qwen3_5MoeForConditionalGeneration",
    (),
)
