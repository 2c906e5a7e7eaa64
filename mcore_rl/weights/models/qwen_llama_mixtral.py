"""Models with grouped-query attention, dense or with softmax routing.

dense                 Llama, Qwen2 (biases of queries, keys and values), Qwen3 (normalizes the
                      queries and keys of each head)
a shared expert       Qwen2-MoE: also biases, and a gate, a sigmoid per token, with which the
                      shared expert's output is multiplied
routed experts alone  Qwen3-MoE (normalizes each head), OLMoE (all heads together), Mixtral
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from mcore_rl.weights.models import rules
from mcore_rl.weights.models.settings import (
    PLAIN_SETTINGS,
    QkNorm,
    find_rope_theta_refusal,
    is_any_layer,
    is_sparse_layer,
    make_base_options,
    make_expert_options,
    make_grouped_query_options,
    need,
    read_base_sizes,
    read_grouped_query_sizes,
    read_rope,
)
from mcore_rl.weights.models.table import Family, HfConfig

LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The constants of Llama 3's rotary embedding that megatron-core has built in.

Only the factor can be set.
"""


def _read_dense_sizes(config: HfConfig, *, qk_norm: QkNorm, qkv_bias: bool) -> Mapping[str, int]:
    return {
        **read_base_sizes(config),
        **read_grouped_query_sizes(config, qk_norm=qk_norm, qkv_bias=qkv_bias),
    }


def _make_dense_options(config: HfConfig, *, qk_norm: QkNorm, qkv_bias: bool) -> dict[str, Any]:
    sizes = _read_dense_sizes(config, qk_norm=qk_norm, qkv_bias=qkv_bias)
    return {**make_base_options(config), **make_grouped_query_options(sizes)}


def has_no_experts(config: HfConfig, layer: int) -> bool:
    return False


def _find_llama_refusal(config: HfConfig) -> str:
    rope = read_rope(config)
    if rope["rope_type"] == "llama3":
        for key, value in LLAMA3_ROPE.items():
            if rope.get(key) != value:
                given = f"rope_type='llama3' with {key}={rope.get(key)!r}"
                return f"{given}: Megatron has {value!r} built in"
    return ""


def _make_dense_family(
    architecture: str, *, qk_norm: QkNorm = "none", qkv_bias: bool = False, **more: Any
) -> Family:
    return Family(
        architecture,
        (*rules.MODEL, *rules.GROUPED_QUERY_ATTENTION, *rules.DENSE_MLP),
        partial(_read_dense_sizes, qk_norm=qk_norm, qkv_bias=qkv_bias),
        has_no_experts,
        partial(_make_dense_options, qk_norm=qk_norm, qkv_bias=qkv_bias),
        PLAIN_SETTINGS,
        **more,
    )


QWEN3 = _make_dense_family(
    "Qwen3ForCausalLM", qk_norm="head", explicit=("num_key_value_heads", "head_dim")
)
QWEN2 = _make_dense_family("Qwen2ForCausalLM", qkv_bias=True, explicit=("num_key_value_heads",))
LLAMA = _make_dense_family(
    "LlamaForCausalLM", rope_types=("default", "llama3"), refusal=_find_llama_refusal
)


def _read_qwen2_moe_sizes(config: HfConfig) -> Mapping[str, int]:
    return {
        **read_base_sizes(config),
        **read_grouped_query_sizes(config, qkv_bias=config.get("qkv_bias", True)),
        "experts": need(config, "num_experts", "num_local_experts"),
        "expert_ffn": need(config, "moe_intermediate_size"),
        "shared_ffn": need(config, "shared_expert_intermediate_size"),
        "one": 1,
    }


def _make_qwen2_moe_options(config: HfConfig) -> dict[str, Any]:
    return {
        **make_base_options(config),
        **make_grouped_query_options(_read_qwen2_moe_sizes(config)),
        **make_expert_options(config, _read_qwen2_moe_sizes(config)),
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
        "moe_shared_expert_intermediate_size": _read_qwen2_moe_sizes(config)["shared_ffn"],
        "moe_shared_expert_gate": True,
    }


SHARED_EXPERT_GATE = rules.make_layer_rule(
    "mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", "one", "hidden", where="moe"
)

QWEN2_MOE = Family(
    "Qwen2MoeForCausalLM",
    (
        *rules.MODEL,
        *rules.GROUPED_QUERY_ATTENTION,
        *rules.DENSE_MLP,
        *rules.EXPERTS,
        *rules.make_shared_expert_rules("mlp.shared_expert"),
        SHARED_EXPERT_GATE,
    ),
    _read_qwen2_moe_sizes,
    is_sparse_layer,
    _make_qwen2_moe_options,
    PLAIN_SETTINGS,
    explicit=("num_key_value_heads",),
)


def _read_moe_sizes(config: HfConfig, *, qk_norm: QkNorm, expert_ffn: str) -> Mapping[str, int]:
    return {
        **read_base_sizes(config),
        **read_grouped_query_sizes(config, qk_norm=qk_norm),
        "experts": need(config, "num_experts", "num_local_experts"),
        "expert_ffn": need(config, expert_ffn),
    }


def _make_moe_options(
    config: HfConfig, *, qk_norm: QkNorm, expert_ffn: str, always_normalized: bool = False
) -> dict[str, Any]:
    sizes = _read_moe_sizes(config, qk_norm=qk_norm, expert_ffn=expert_ffn)
    return {
        **make_base_options(config),
        **make_grouped_query_options(sizes),
        **make_expert_options(config, sizes),
        "moe_router_pre_softmax": not (always_normalized or config.get("norm_topk_prob", False)),
    }


QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    (*rules.MODEL, *rules.GROUPED_QUERY_ATTENTION, *rules.DENSE_MLP, *rules.EXPERTS),
    partial(_read_moe_sizes, qk_norm="head", expert_ffn="moe_intermediate_size"),
    is_sparse_layer,
    partial(_make_moe_options, qk_norm="head", expert_ffn="moe_intermediate_size"),
    PLAIN_SETTINGS,
    explicit=("num_key_value_heads",),
)

MIXTRAL = Family(
    "MixtralForCausalLM",
    (*rules.MODEL, *rules.GROUPED_QUERY_ATTENTION, *rules.NUMBERED_EXPERTS),
    partial(_read_moe_sizes, qk_norm="none", expert_ffn="intermediate_size"),
    is_any_layer,
    partial(
        _make_moe_options, qk_norm="none", expert_ffn="intermediate_size", always_normalized=True
    ),
    {**PLAIN_SETTINGS, "sliding_window": (None,)},
    refusal=find_rope_theta_refusal,
    explicit=("num_key_value_heads",),
)

OLMOE = Family(
    "OlmoeForCausalLM",
    (*rules.MODEL, *rules.GROUPED_QUERY_ATTENTION, *rules.EXPERTS),
    partial(_read_moe_sizes, qk_norm="projection", expert_ffn="intermediate_size"),
    is_any_layer,
    partial(_make_moe_options, qk_norm="projection", expert_ffn="intermediate_size"),
    {**PLAIN_SETTINGS, "clip_qkv": (None,)},
)
