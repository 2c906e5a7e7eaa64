"""Qwen3-Next and the text models of Qwen3.5: gated delta nets, and gated attention in each fourth
layer.

A gated delta net (arXiv:2412.06464) is linear attention. Megatron projects its inputs at once, and
each tensor-parallel rank has its heads' rows of every part:

    in_proj       query | key | value | z | beta | alpha     one Megatron key for each part
    Qwen3-Next    in_proj_qkvz = q0 k0 v0 z0 | q1 k1 v1 z1   in_proj_ba = b0 a0 | b1 a1     by head
    Qwen3.5       in_proj_qkv = q k v     in_proj_z = z      in_proj_b = b     in_proj_a = a

Softmax attention has a gate for each of its outputs, whose rows lie in q_proj behind the queries of
the same head. Norms are multiplied with 1 + weight, except for that of a delta net's outputs.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from mcore_rl.weights.models import rules
from mcore_rl.weights.models.mtp import ALONE, ALONE_LAYER, TRAINED, make_mtp_rules
from mcore_rl.weights.models.qwen_llama_mixtral import SHARED_EXPERT_GATE, has_no_experts
from mcore_rl.weights.models.settings import (
    PLAIN_SETTINGS,
    find_rope_theta_refusal,
    is_any_layer,
    make_base_options,
    make_expert_options,
    make_grouped_query_options,
    need,
    read_base_sizes,
    read_grouped_query_sizes,
    read_rotary_share,
)
from mcore_rl.weights.models.table import Family, HfConfig, HfTensor, Rule, Section, Where

LINEAR = "linear_attention"
SOFTMAX = "full_attention"
EXPLICIT = (
    "num_key_value_heads",
    "head_dim",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
SETTINGS: Mapping[str, tuple[Any, ...]] = {
    **PLAIN_SETTINGS,
    "attn_output_gate": (True,),
    "output_gate_type": ("silu", "swish"),
    "mlp_only_layers": ([], None),
    "decoder_sparse_step": (1,),
}


def read_layer_types(config: HfConfig) -> list[str]:
    """Return the kind of attention of each layer; published files may name the interval only."""
    kinds = config.get("layer_types")
    if kinds is not None:
        return list(kinds)
    interval = config.get("full_attention_interval") or 4
    layers = range(need(config, "num_hidden_layers"))
    return [LINEAR if (layer + 1) % interval else SOFTMAX for layer in layers]


def is_linear_layer(config: HfConfig, layer: int) -> bool:
    return read_layer_types(config)[layer] == LINEAR


def read_sizes(config: HfConfig, *, shared: bool = False) -> dict[str, int]:
    """Return the sizes of both kinds of attention and of an MLP or, with `shared`, of experts."""
    attention = read_grouped_query_sizes(config, qk_norm="head")
    key_heads = need(config, "linear_num_key_heads")
    heads = need(config, "linear_num_value_heads")
    keys = key_heads * need(config, "linear_key_head_dim")
    values = heads * need(config, "linear_value_head_dim")
    sizes = {
        **read_base_sizes({**config, "intermediate_size": 0} if shared else config),
        **attention,
        "heads": need(config, "num_attention_heads"),
        "gated_q": 2 * attention["q"],
        "delta_key_heads": key_heads,
        "delta_heads": heads,
        "delta_keys": keys,
        "delta_values": values,
        "delta_qkv": 2 * keys + values,
        "delta_qkvz": 2 * keys + 2 * values,
        "delta_ba": 2 * heads,
        "delta_head": need(config, "linear_value_head_dim"),
        "delta_kernel": need(config, "linear_conv_kernel_dim"),
        "one": 1,
    }
    if shared:
        sizes |= {
            "experts": need(config, "num_experts"),
            "expert_ffn": need(config, "moe_intermediate_size"),
            "shared_ffn": need(config, "shared_expert_intermediate_size"),
        }
    return sizes


def make_options(config: HfConfig) -> dict[str, Any]:
    """Return the arguments of TransformerConfig that have to do with attention and norms."""
    return {
        **make_base_options(config),
        **make_grouped_query_options(read_grouped_query_sizes(config, qk_norm="head")),
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(kind == LINEAR) for kind in read_layer_types(config)],
        "linear_conv_kernel_dim": need(config, "linear_conv_kernel_dim"),
        "linear_key_head_dim": need(config, "linear_key_head_dim"),
        "linear_value_head_dim": need(config, "linear_value_head_dim"),
        "linear_num_key_heads": need(config, "linear_num_key_heads"),
        "linear_num_value_heads": need(config, "linear_num_value_heads"),
    }


def make_moe_options(config: HfConfig) -> dict[str, Any]:
    sizes = read_sizes(config, shared=True)
    return {
        # No layer is dense: whatever size a config.json names for one, or does not.
        **make_options({**config, "intermediate_size": sizes["expert_ffn"]}),
        **make_expert_options(config, sizes),
        "moe_router_pre_softmax": not config.get("norm_topk_prob", True),
        "moe_shared_expert_intermediate_size": sizes["shared_ffn"],
        "moe_shared_expert_gate": True,
    }


def find_refusal(config: HfConfig) -> str:
    kinds = read_layer_types(config)
    num_layers = need(config, "num_hidden_layers")
    if len(kinds) != num_layers or not set(kinds) <= {LINEAR, SOFTMAX}:
        return (
            f"layer_types has {len(kinds)} entries ({', '.join(sorted(set(kinds)))}) for"
            f" {num_layers} layers; each is one of {LINEAR} and {SOFTMAX}"
        )
    interval = config.get("full_attention_interval")
    if interval and kinds != read_layer_types({**config, "layer_types": None}):
        return f"layer_types is not what full_attention_interval={interval} says"
    key_heads = need(config, "linear_num_key_heads")
    heads = need(config, "linear_num_value_heads")
    if heads % key_heads:
        return f"linear_num_key_heads={key_heads} does not divide linear_num_value_heads={heads}"
    return find_rope_theta_refusal(config)


def _make_rule(key: str, name: str, *axes: str, where: Where = "linear", **more: Any) -> Rule:
    tensor = HfTensor(rules.HF_LAYER + name, axes, **more)
    return Rule(rules.LAYER + rules.ATTENTION + key, (tensor,), where)


def _make_part_rules(
    key: str, name: str, axes: tuple[str, ...], parts: Mapping[str, str], units: str | None
) -> tuple[Rule, ...]:
    """Return a rule for each part of an HF tensor: name of the part -> size of its rows."""
    sections = {
        part: Section(rows, tuple(parts.values())[:number], units)
        for number, (part, rows) in enumerate(parts.items())
    }
    return tuple(
        _make_rule(f"{key}.{part}", name, *axes, section=section)
        for part, section in sections.items()
    )


QKV = {"query": "delta_keys", "key": "delta_keys", "value": "delta_values"}
DELTA_NET = (
    _make_rule("in_proj.layer_norm_weight", "input_layernorm.weight", "hidden", initial="zeros"),
    *_make_part_rules(
        *("conv1d.weight", "linear_attn.conv1d.weight", ("delta_qkv", "one", "delta_kernel"), QKV),
        units=None,
    ),
    _make_rule("dt_bias", "linear_attn.dt_bias", "delta_heads", initial="ones"),
    _make_rule("A_log", "linear_attn.A_log", "delta_heads", initial="log"),
    _make_rule("out_norm.weight", "linear_attn.norm.weight", "delta_head"),
    _make_rule("out_proj.weight", "linear_attn.out_proj.weight", "hidden", "delta_values"),
)
BY_HEAD = (
    *_make_part_rules(
        *("in_proj.weight", "linear_attn.in_proj_qkvz.weight", ("delta_qkvz", "hidden")),
        {**QKV, "z": "delta_values"},
        units="delta_key_heads",
    ),
    *_make_part_rules(
        *("in_proj.weight", "linear_attn.in_proj_ba.weight", ("delta_ba", "hidden")),
        {"beta": "delta_heads", "alpha": "delta_heads"},
        units="delta_key_heads",
    ),
)
"""The projections of a delta net in Qwen3-Next."""
BY_PART = (
    *_make_part_rules(
        *("in_proj.weight", "linear_attn.in_proj_qkv.weight", ("delta_qkv", "hidden"), QKV),
        units=None,
    ),
    _make_rule("in_proj.weight.z", "linear_attn.in_proj_z.weight", "delta_values", "hidden"),
    _make_rule("in_proj.weight.beta", "linear_attn.in_proj_b.weight", "delta_heads", "hidden"),
    _make_rule("in_proj.weight.alpha", "linear_attn.in_proj_a.weight", "delta_heads", "hidden"),
)
"""The same in Qwen3.5."""


def _make_gated_query(before: tuple[str, ...]) -> HfTensor:
    section = Section("q", before, units="heads")
    return HfTensor(
        rules.HF_LAYER + "self_attn.q_proj.weight", ("gated_q", "hidden"), section=section
    )


def _make_kv(name: str) -> HfTensor:
    return HfTensor(f"{rules.HF_LAYER}self_attn.{name}_proj.weight", ("kv", "hidden"))


_make_softmax_rule = partial(_make_rule, where="softmax")
GATED_ATTENTION = (
    _make_softmax_rule(
        "linear_qkv.layer_norm_weight", "input_layernorm.weight", "hidden", initial="zeros"
    ),
    Rule(
        rules.LAYER + rules.ATTENTION + "linear_qkv.weight",
        (_make_gated_query(()), _make_gated_query(("q",)), _make_kv("k"), _make_kv("v")),
        "softmax",
        groups="kv_heads",
    ),
    _make_softmax_rule("q_layernorm.weight", "self_attn.q_norm.weight", "head", initial="zeros"),
    _make_softmax_rule("k_layernorm.weight", "self_attn.k_norm.weight", "head", initial="zeros"),
    _make_softmax_rule("linear_proj.weight", "self_attn.o_proj.weight", "hidden", "q"),
)
MLP = rules.center_norms((*rules.MODEL, *rules.DENSE_MLP))
MOE = (
    *rules.center_norms((*rules.MODEL, *rules.EXPERTS)),
    *rules.make_shared_expert_rules("mlp.shared_expert"),
    SHARED_EXPERT_GATE,
)


def count_mtp_layers(config: HfConfig) -> int:
    """Return the layers for multi-token prediction; published files of Qwen3-Next do not say."""
    return config.get("mtp_num_hidden_layers", 1)


def match_mtp(config: HfConfig) -> str:
    """Return the names of layers for multi-token prediction that are not trained, "" if none."""
    return r"mtp\..*" if count_mtp_layers(config) and not config.get(TRAINED) else ""


def _make_family(
    architecture: str, projections: tuple[Rule, ...], *, moe: bool, **supported: tuple[Any, ...]
) -> Family:
    rest = MOE if moe else MLP
    last = (*(rule for rule in rest if rule.where != "model"), *GATED_ATTENTION)
    mtp = make_mtp_rules(last, ALONE, ALONE_LAYER)
    return Family(
        architecture,
        (*rest, *DELTA_NET, *projections, *GATED_ATTENTION, *mtp),
        partial(read_sizes, shared=moe),
        is_any_layer if moe else has_no_experts,
        make_moe_options if moe else make_options,
        {**SETTINGS, **supported},
        refusal=find_refusal,
        carried=match_mtp,
        mtp_layers=count_mtp_layers,
        rotary_share=lambda config: read_rotary_share(config, default=0.25),
        is_linear=is_linear_layer,
        explicit=EXPLICIT,
    )


QWEN3_NEXT = _make_family("Qwen3NextForCausalLM", BY_HEAD, moe=True)
QWEN3_5 = _make_family("Qwen3_5ForCausalLM", BY_PART, moe=False)
QWEN3_5_MOE = _make_family("Qwen3_5MoeForCausalLM", BY_PART, moe=True, norm_topk_prob=(True,))
