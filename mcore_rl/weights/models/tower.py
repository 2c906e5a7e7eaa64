"""Rules of vision towers, which Megatron holds under transformers' own names; that of Qwen2.5-VL.

    Megatron key (without block number)      HF name
    visual.blocks.attn.qkv.weight        <-  visual.blocks.{layer}.attn.qkv.weight
    visual.merger.mlp.0.weight           <-  visual.merger.mlp.0.weight

docs/vision.md says why the tower is transformers' module.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from mcore_rl.weights.models.settings import need, read_rope
from mcore_rl.weights.models.table import HfConfig, HfTensor, Rule

PLACEHOLDERS = ("image_token_id", "media_placeholder_token_id")
"""Keys of config.json, of which one names the token that stands for a piece of an image."""
PREFIX = "visual."
"""Where Megatron's keys of a tower's tensors begin; HF names may have another prefix."""
PROJECTOR = PREFIX + "merger."
"""Where the keys of the projector into the language model's embeddings begin."""
PROJECTORS = (PROJECTOR, PREFIX + "deepstack_merger_list.")
"""Where the keys of the projectors into the language model's hidden states begin."""
LANGUAGE = "model.language_model."
"""Where HF names of the language model begin in families that put it beside the tower."""
VISUAL = "model.visual."
"""Where HF names of the tower begin in these families."""

TRAINED: Mapping[str, tuple[str, ...]] = {"all": (PREFIX,), "projector": PROJECTORS, "none": ()}
"""train.vision -> where the keys of those parameters of the tower begin that are trained."""


def is_frozen(key: str, part: str) -> bool:
    """Return whether train.vision=`part` leaves the parameter of this Megatron key as it is."""
    return key.startswith(PREFIX) and not key.startswith(TRAINED[part])


def make_block_rule(name: str, *axes: str, visual: str = PREFIX) -> Rule:
    """Return the rule of a tensor of every block; its HF names begin with `visual`."""
    tensor = HfTensor(f"{visual}blocks.{{layer}}.{name}", axes)
    return Rule(f"{PREFIX}blocks.{name}", (tensor,), where="tower")


def make_tower_rule(name: str, *axes: str, visual: str = PREFIX) -> Rule:
    """Return the rule of a tensor outside the tower's blocks; its HF name begins with `visual`."""
    return Rule(PREFIX + name, (HfTensor(visual + name, axes),), where="model")


def make_linear_rules(name: str, rows: str, columns: str) -> tuple[Rule, Rule]:
    """Return the rules of weight and bias of a linear layer of every block."""
    return make_block_rule(f"{name}.weight", rows, columns), make_block_rule(f"{name}.bias", rows)


def make_language_rules(
    rules: Iterable[Rule], old: str = "model.", new: str = LANGUAGE
) -> Iterator[Rule]:
    """Yield the rules of a language model whose HF names have `new` in place of their first `old`.

    An empty `old` puts `new` before every name.
    """
    for rule in rules:
        tensors = (replace(t, name=t.name.replace(old, new, 1)) for t in rule.tensors)
        yield replace(rule, tensors=tuple(tensors))


RULES = (
    make_tower_rule(
        "patch_embed.proj.weight",
        *("tower_hidden", "channels", "patch_frames", "patch", "patch"),
    ),
    make_block_rule("norm1.weight", "tower_hidden"),
    make_block_rule("norm2.weight", "tower_hidden"),
    *make_linear_rules("attn.qkv", "tower_qkv", "tower_hidden"),
    *make_linear_rules("attn.proj", "tower_hidden", "tower_hidden"),
    *make_linear_rules("mlp.gate_proj", "tower_ffn", "tower_hidden"),
    *make_linear_rules("mlp.up_proj", "tower_ffn", "tower_hidden"),
    *make_linear_rules("mlp.down_proj", "tower_hidden", "tower_ffn"),
    make_tower_rule("merger.ln_q.weight", "tower_hidden"),
    make_tower_rule("merger.mlp.0.weight", "merged", "merged"),
    make_tower_rule("merger.mlp.0.bias", "merged"),
    make_tower_rule("merger.mlp.2.weight", "hidden", "merged"),
    make_tower_rule("merger.mlp.2.bias", "hidden"),
)


def read_vision_settings(config: HfConfig) -> Mapping[str, Any]:
    """Return `vision_config` of config.json. Raises ValueError if there is none."""
    return need(config, "vision_config")


def merge_size(config: HfConfig) -> int:
    """Return the patches along height and along width that become one token.

    Raises ValueError if the two differ.
    """
    vision = read_vision_settings(config)
    kernel = vision.get("merge_kernel_size")
    if kernel is None:
        return vision.get("spatial_merge_size", 2)
    if not isinstance(kernel, list | tuple) or len(kernel) != 2 or kernel[0] != kernel[1]:
        raise ValueError(
            f"merge_kernel_size={kernel} of vision_config in config.json: only two equal numbers"
            " are supported"
        )
    return kernel[0]


def read_placeholder(config: HfConfig) -> int | None:
    """Return the token that stands for a piece of an image; None if config.json names none."""
    return next((config[key] for key in PLACEHOLDERS if config.get(key) is not None), None)


def read_tower_sizes(config: HfConfig) -> dict[str, int]:
    """Return the sizes of a tower. Raises ValueError naming a key that vision_config lacks."""
    vision = read_vision_settings(config)
    hidden = need_for_tower(vision, "hidden_size")
    return {
        "tower_blocks": need_for_tower(vision, "depth"),
        "tower_hidden": hidden,
        "tower_qkv": 3 * hidden,
        "tower_heads": need_for_tower(vision, "num_heads"),
        "tower_ffn": need_for_tower(vision, "intermediate_size"),
        "tower_block_ffn": need_for_tower(vision, "intermediate_size"),
        "merged": hidden * vision.get("spatial_merge_size", 2) ** 2,
        "channels": vision.get("in_channels", vision.get("in_chans", 3)),
        "patch_frames": vision.get("temporal_patch_size", 2),
        "patch": vision.get("patch_size", 14),
    }


def find_section_refusal(config: HfConfig, rotated: int) -> str:
    """Return why the three axes do not share the `rotated` numbers of a head; "" if they do."""
    section = read_rope(config).get("mrope_section")
    if not section:
        return "its rotary settings lack 'mrope_section'"
    if sum(section) != rotated // 2:
        half = "half of what is rotated of a head"
        return f"mrope_section={section} should add up to {half}, {rotated // 2}"
    return ""


def find_tower_refusal(config: HfConfig) -> str:
    """Return why the tower of config.json cannot be carried; "" if it can."""
    vision = read_vision_settings(config)
    width = need_for_tower(vision, "out_hidden_size")
    if width != need(config, "hidden_size"):
        return (
            f"vision_config.out_hidden_size={width} is not hidden_size={config['hidden_size']} of"
            " the language model"
        )
    return ""


def need_for_tower(vision: Mapping[str, Any], key: str) -> int:
    """Return a number of vision_config, at least 1.

    Raises ValueError naming a key that it lacks, or with another value.
    """
    value = vision.get(key)
    if value is None:
        raise ValueError(f"vision_config of config.json lacks {key!r}")
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}={value!r} of vision_config: it should be a number, at least 1")
    return value
