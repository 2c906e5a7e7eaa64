"""gpt-oss: attention with sinks and sliding windows, and biases everywhere.

All experts of a layer are stacked in one HF tensor, each transposed, and its gate and up columns
alternate:

    mlp.experts.gate_up_proj [experts, hidden, 2 * ffn]      Megatron, one tensor per expert
    expert 0: columns g0 u0 g1 u1 ...                   -->  linear_fc1: rows g0 u0 g1 u1 ...
"""

from collections.abc import Mapping
from typing import Any

from mcore_rl.weights.models import rules
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
    read_rope,
)
from mcore_rl.weights.models.table import Family, HfConfig, HfTensor, Rule

WINDOWED = "sliding_attention"
FULL = "full_attention"
ALPHA = 1.702
"""Slope of the sigmoid in the experts' activation, built into Megatron's quick_gelu and SGLang."""


def read_sizes(config: HfConfig) -> Mapping[str, int]:
    expert_ffn = need(config, "intermediate_size")
    return {
        **read_base_sizes(config),
        **read_grouped_query_sizes(config, qkv_bias=True),
        "heads": need(config, "num_attention_heads"),
        "experts": need(config, "num_local_experts", "num_experts"),
        "expert_ffn": expert_ffn,
        "gate_up": 2 * expert_ffn,
    }


def make_options(config: HfConfig) -> dict[str, Any]:
    return {
        **make_base_options(config),
        **make_grouped_query_options(read_sizes(config)),
        **make_expert_options(config, read_sizes(config)),
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "window_size": (need(config, "sliding_window") - 1, 0),
        "window_attn_skip_freq": [int(kind == WINDOWED) for kind in need(config, "layer_types")],
        "activation_func": "quick_gelu",
        "activation_func_clamp_value": float(need(config, "swiglu_limit")),
        "glu_linear_offset": 1.0,
    }


def _find_refusal(config: HfConfig) -> str:
    kinds = need(config, "layer_types")
    num_layers = need(config, "num_hidden_layers")
    if len(kinds) != num_layers or not set(kinds) <= {WINDOWED, FULL}:
        return (
            f"layer_types has {len(kinds)} entries ({', '.join(sorted(set(kinds)))}) for"
            f" {num_layers} layers; each is one of {WINDOWED} and {FULL}"
        )
    if read_rope(config).get("attention_factor") is not None:
        return (
            "the rotary embedding has an attention_factor of its own, which Megatron does not take"
        )
    return find_rope_theta_refusal(config)


def _make_expert_rule(module: str, name: str, *axes: str) -> Rule:
    """Return the rule of an HF tensor that stacks all experts; `axes` are those of one expert."""
    tensor = HfTensor(f"{rules.HF_LAYER}mlp.experts.{name}", ("experts", *axes))
    return Rule(f"{rules.LAYER}mlp.experts.experts.{module}", (tensor,), "moe", stacked=True)


EXPERTS = (
    rules.make_layer_rule(
        "pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "hidden", where="moe"
    ),
    rules.make_layer_rule(
        "mlp.router.weight", "mlp.router.weight", "experts", "hidden", where="moe"
    ),
    rules.make_layer_rule("mlp.router.bias", "mlp.router.bias", "experts", where="moe"),
    _make_expert_rule("linear_fc1.weight", "gate_up_proj", "hidden", "gate_up"),
    _make_expert_rule("linear_fc1.bias", "gate_up_proj_bias", "gate_up"),
    _make_expert_rule("linear_fc2.weight", "down_proj", "expert_ffn", "hidden"),
    _make_expert_rule("linear_fc2.bias", "down_proj_bias", "hidden"),
)

GPT_OSS = Family(
    "GptOssForCausalLM",
    (
        *rules.MODEL,
        *rules.GROUPED_QUERY_ATTENTION,
        rules.make_layer_rule(
            rules.ATTENTION + "core_attention.softmax_offset", "self_attn.sinks", "heads"
        ),
        rules.make_layer_rule(
            rules.ATTENTION + "linear_proj.bias", "self_attn.o_proj.bias", "hidden"
        ),
        *EXPERTS,
    ),
    read_sizes,
    is_any_layer,
    make_options,
    {
        **PLAIN_SETTINGS,
        "attention_bias": (True,),
        "swiglu_alpha": (ALPHA,),
        "hidden_act_alpha": (ALPHA,),
    },
    rope_types=("yarn",),
    refusal=_find_refusal,
    alternating=True,
    explicit=("num_key_value_heads", "head_dim"),
)
