"""Dense models: Llama, Qwen2 and Qwen3.

Qwen2 adds biases of queries, keys and values. Qwen3 normalizes each head's queries
and keys instead.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from mcore_rl.weights.models import rules
from mcore_rl.weights.models.settings import (
    PLAIN_SETTINGS,
    QkNorm,
    base_options,
    base_sizes,
    grouped_query_options,
    grouped_query_sizes,
    rope_of,
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


def _sizes(config: HfConfig, *, qk_norm: QkNorm, qkv_bias: bool) -> Mapping[str, int]:
    return {**base_sizes(config), **grouped_query_sizes(config, qk_norm=qk_norm, qkv_bias=qkv_bias)}


def _options(config: HfConfig, *, qk_norm: QkNorm, qkv_bias: bool) -> dict[str, Any]:
    sizes = _sizes(config, qk_norm=qk_norm, qkv_bias=qkv_bias)
    return {**base_options(config), **grouped_query_options(sizes)}


def _never(config: HfConfig, layer: int) -> bool:
    return False


def _llama_refusal(config: HfConfig) -> str:
    rope = rope_of(config)
    if rope["rope_type"] == "llama3":
        for key, value in LLAMA3_ROPE.items():
            if rope.get(key) != value:
                given = f"rope_type='llama3' with {key}={rope.get(key)!r}"
                return f"{given}: Megatron has {value!r} built in"
    return ""


def _dense(
    architecture: str, *, qk_norm: QkNorm = "none", qkv_bias: bool = False, **more: Any
) -> Family:
    return Family(
        architecture,
        (*rules.MODEL, *rules.GROUPED_QUERY_ATTENTION, *rules.DENSE_MLP),
        partial(_sizes, qk_norm=qk_norm, qkv_bias=qkv_bias),
        _never,
        partial(_options, qk_norm=qk_norm, qkv_bias=qkv_bias),
        PLAIN_SETTINGS,
        **more,
    )


QWEN3 = _dense("Qwen3ForCausalLM", qk_norm="head", explicit=("num_key_value_heads", "head_dim"))
QWEN2 = _dense("Qwen2ForCausalLM", qkv_bias=True, explicit=("num_key_value_heads",))
LLAMA = _dense("LlamaForCausalLM", rope_types=("default", "llama3"), refusal=_llama_refusal)
