"""MiniMax-M2.

Queries and keys are normalized over all heads together, the rotary embedding rotates a part of each
head, and experts are chosen with a bias.
"""

from collections.abc import Mapping
from typing import Any

from mcore_rl.weights.models import rules
from mcore_rl.weights.models.settings import (
    BIASED_SIGMOID,
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
from mcore_rl.weights.models.table import Family, HfConfig


def read_sizes(config: HfConfig) -> Mapping[str, int]:
    return {
        **read_base_sizes(config),
        **read_grouped_query_sizes(config, qk_norm="projection"),
        "experts": need(config, "num_local_experts", "num_experts"),
        "expert_ffn": need(config, "intermediate_size"),
    }


def make_options(config: HfConfig) -> dict[str, Any]:
    return {
        **make_base_options(config),
        **make_grouped_query_options(read_sizes(config)),
        **make_expert_options(config, read_sizes(config)),
        **BIASED_SIGMOID,
    }


def _find_refusal(config: HfConfig) -> str:
    if any(kind != 1 for kind in config.get("attn_type_list") or ()):
        return "attn_type_list has kinds of attention other than 1, softmax attention"
    return find_rope_theta_refusal(config)


def _read_rotary_share(config: HfConfig) -> float:
    head = read_sizes(config)["head"]
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
    read_sizes,
    is_any_layer,
    make_options,
    {
        **PLAIN_SETTINGS,
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),
        "use_routing_bias": (True,),
        "scoring_func": ("sigmoid",),
        "shared_intermediate_size": (0,),
    },
    refusal=_find_refusal,
    rotary_share=_read_rotary_share,
    explicit=("num_key_value_heads", "head_dim"),
)
