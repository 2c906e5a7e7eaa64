"""config.json in, sizes of the axes and TransformerConfig's settings out: what families share."""

from collections.abc import Mapping
from typing import Any

from mcore_rl.slices.families.table import HfConfig

PLAIN_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "quantization_config": (None,),
}
"""What every family here asks of config.json."""


def need(config: HfConfig, *keys: str) -> Any:
    """The value of the first of `keys` that config.json has; ValueError names the first if it has none."""
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise ValueError(f"config.json of {(config.get('architectures') or ['a model'])[0]} lacks {keys[0]!r}")


def base_sizes(config: HfConfig) -> dict[str, int]:
    return {
        "vocab": need(config, "vocab_size"),
        "hidden": need(config, "hidden_size"),
        "layers": need(config, "num_hidden_layers"),
        "dense_ffn": need(config, "intermediate_size"),
        "experts": 0,
        "expert_ffn": 0,
    }


def grouped_query_sizes(config: HfConfig, *, qk_norm: bool, qkv_bias: bool = False) -> dict[str, int]:
    heads = need(config, "num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or need(config, "hidden_size") // heads
    q, kv = heads * head, kv_heads * head
    return {
        "head": head,
        "q": q,
        "kv": kv,
        "kv_heads": kv_heads,
        "qk_norm": head if qk_norm else 0,
        "q_bias": q if qkv_bias else 0,
        "kv_bias": kv if qkv_bias else 0,
    }


def latent_sizes(config: HfConfig) -> dict[str, int]:
    heads, kv_rank = need(config, "num_attention_heads"), need(config, "kv_lora_rank")
    nope, rope = need(config, "qk_nope_head_dim"), need(config, "qk_rope_head_dim")
    q_rank, value = config.get("q_lora_rank") or 0, need(config, "v_head_dim")
    q = heads * (nope + rope)
    return {
        "q": q,
        "whole_q": 0 if q_rank else q,
        "q_rank": q_rank,
        "kv_rank": kv_rank,
        "kv_down": kv_rank + rope,
        "kv_up": heads * (nope + value),
        "v": heads * value,
    }


def base_options(config: HfConfig) -> dict[str, Any]:
    """TransformerConfig's settings that every family here has."""
    return {
        "num_layers": need(config, "num_hidden_layers"),
        "hidden_size": need(config, "hidden_size"),
        "ffn_hidden_size": need(config, "intermediate_size"),
        "num_attention_heads": need(config, "num_attention_heads"),
        "layernorm_epsilon": need(config, "rms_norm_eps"),
    }


def grouped_query_options(sizes: Mapping[str, int]) -> dict[str, Any]:
    return {
        "num_query_groups": sizes["kv_heads"],
        "kv_channels": sizes["head"],
        "qk_layernorm": sizes["qk_norm"] > 0,
        "add_qkv_bias": sizes["q_bias"] > 0,
    }


def latent_options(config: HfConfig) -> dict[str, Any]:
    rope = rope_of(config)
    options = {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": config.get("q_lora_rank"),
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
        "rope_type": "rope",
        "rotary_base": float(rope["rope_theta"]),
        "rotary_scaling_factor": 1.0,
    }
    if rope["rope_type"] == "yarn":
        options |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": float(need(rope, "factor")),
            "original_max_position_embeddings": need(rope, "original_max_position_embeddings"),
            "beta_fast": float(rope.get("beta_fast", 32)),
            "beta_slow": float(rope.get("beta_slow", 1)),
            "mscale": float(rope.get("mscale", 1.0)),
            "mscale_all_dim": float(rope.get("mscale_all_dim", 0.0)),
        }
    return options


def expert_options(config: HfConfig, sizes: Mapping[str, int]) -> dict[str, Any]:
    return {
        "num_moe_experts": sizes["experts"],
        "moe_ffn_hidden_size": sizes["expert_ffn"],
        "moe_router_topk": need(config, "num_experts_per_tok"),
    }


def rope_of(config: HfConfig) -> dict[str, Any]:
    """The rotary embedding's settings with at least rope_type and rope_theta, in either of HF's spellings."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    return rope


def always_dense(config: HfConfig, layer: int) -> bool:
    return False
