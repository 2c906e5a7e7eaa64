"""GLM-4.5 and GLM-4.6.

The rotary embedding rotates half of each head, experts are chosen with a bias, some experts are
shared, and the first layers are dense.
"""

from collections.abc import Mapping
from typing import Any

from mcore_rl.weights.models import rules
from mcore_rl.weights.models.settings import (
    BIASED_SIGMOID,
    PLAIN_SETTINGS,
    after_dense_layers,
    base_options,
    base_sizes,
    group_refusal,
    grouped_query_options,
    grouped_query_sizes,
    mtp_names,
    partial_rotary_share,
    shared_expert_options,
    shared_expert_sizes,
)
from mcore_rl.weights.models.table import Family, HfConfig


def sizes(config: HfConfig) -> Mapping[str, int]:
    attention = grouped_query_sizes(
        config,
        qk_norm="head" if config.get("use_qk_norm") else "none",
        qkv_bias=config.get("attention_bias", False),
    )
    return {**base_sizes(config), **attention, **shared_expert_sizes(config)}


def options(config: HfConfig) -> dict[str, Any]:
    return {
        **base_options(config),
        **grouped_query_options(sizes(config)),
        **shared_expert_options(config, sizes(config)),
        **BIASED_SIGMOID,
    }


FAMILY = Family(
    "Glm4MoeForCausalLM",
    (
        *rules.MODEL,
        *rules.GROUPED_QUERY_ATTENTION,
        *rules.DENSE_MLP,
        *rules.EXPERTS,
        rules.expert_bias("mlp.gate.e_score_correction_bias"),
        *rules.SHARED_EXPERTS,
    ),
    sizes,
    after_dense_layers,
    options,
    {**PLAIN_SETTINGS, "attention_bias": (False, True), "norm_topk_prob": (True,)},
    refusal=lambda config: group_refusal(config, scored_by=2),
    explicit=("num_key_value_heads", "first_k_dense_replace", "n_shared_experts"),
    carried=mtp_names,
    rotary_share=lambda config: partial_rotary_share(config, default=0.5),
)
