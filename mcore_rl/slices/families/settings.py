"""config.json in, sizes of the axes and TransformerConfig's settings out: what families share."""

from collections.abc import Mapping
from typing import Any, Literal

from mcore_rl.slices.families.table import HfConfig

PLAIN_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
}
"""What every family here asks of config.json."""

DEQUANTISED = ("fp8", "mxfp4")
"""What quant_method may be for `mcore-rl-ckpt dequantise`."""
DEQUANTISE = (
    "write its weights in bfloat16 first: mcore-rl-ckpt dequantise <this directory> <another>"
)


def unquantised(config: HfConfig) -> dict[str, Any]:
    """config.json of the same model with plain weights."""
    return {key: value for key, value in config.items() if key != "quantization_config"}


def refuse_quantised(config: HfConfig, file: object) -> None:
    """ValueError with the remedy if the weights of the model that `file` describes are quantised."""
    settings = config.get("quantization_config")
    if settings is None:
        return
    method = settings.get("quant_method") if isinstance(settings, Mapping) else settings
    only = " and ".join(map(repr, DEQUANTISED))
    remedy = (
        DEQUANTISE
        if method in DEQUANTISED
        else f"take its plain weights, for only {only} can be converted"
    )
    raise ValueError(
        f"the model of {file} is quantised (quantization_config, quant_method={method!r}): {remedy}"
    )


def need(config: HfConfig, *keys: str) -> Any:
    """The value of the first of `keys` that config.json has; ValueError names the first if it has none."""
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise ValueError(
        f"config.json of {(config.get('architectures') or ['a model'])[0]} lacks {keys[0]!r}"
    )


def base_sizes(config: HfConfig) -> dict[str, int]:
    return {
        "vocab": need(config, "vocab_size"),
        "hidden": need(config, "hidden_size"),
        "layers": need(config, "num_hidden_layers"),
        "dense_ffn": need(config, "intermediate_size"),
        "experts": 0,
        "expert_ffn": 0,
    }


QkNorm = Literal["none", "head", "projection"]
"""Whether queries and keys are normalised, and over what: each head by itself, or all heads together."""


def grouped_query_sizes(
    config: HfConfig, *, qk_norm: QkNorm = "none", qkv_bias: bool = False
) -> dict[str, int]:
    heads = need(config, "num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or need(config, "hidden_size") // heads
    q, kv = heads * head, kv_heads * head
    return {
        "head": head,
        "q": q,
        "kv": kv,
        "kv_heads": kv_heads,
        "q_norm": {"none": 0, "head": head, "projection": q}[qk_norm],
        "k_norm": {"none": 0, "head": head, "projection": kv}[qk_norm],
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
        "qk_layernorm": sizes["q_norm"] > 0,
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


def shared_expert_sizes(config: HfConfig) -> dict[str, int]:
    """Experts by DeepSeek's names; the shared ones are one MLP."""
    expert_ffn = need(config, "moe_intermediate_size")
    return {
        "experts": need(config, "n_routed_experts", "num_local_experts"),
        "expert_ffn": expert_ffn,
        "shared_ffn": expert_ffn * (config.get("n_shared_experts") or 0),
    }


def shared_expert_options(config: HfConfig, sizes: Mapping[str, int]) -> dict[str, Any]:
    options = {
        **expert_options(config, sizes),
        "moe_shared_expert_intermediate_size": sizes["shared_ffn"] or None,
        "moe_router_topk_scaling_factor": config.get("routed_scaling_factor", 1.0),
    }
    if (config.get("n_group") or 1) > 1:
        options["moe_router_num_groups"] = config["n_group"]
        options["moe_router_group_topk"] = need(config, "topk_group")
    return options


BIASED_SIGMOID: Mapping[str, Any] = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.0,
}
"""Options of a router that scores by sigmoid and chooses with a bias, which Megatron itself leaves alone."""


def group_refusal(config: HfConfig, scored_by: int) -> str:
    """megatron-core scores a group by the sum of its best top_k // topk_group experts."""
    if (config.get("n_group") or 1) == 1:
        return ""
    top_k, groups = need(config, "num_experts_per_tok"), need(config, "topk_group")
    if top_k // groups == scored_by:
        return ""
    return (
        f"num_experts_per_tok={top_k} and topk_group={groups}: Megatron would score a group of experts by its"
        f" best {top_k // groups}, the model by its best {scored_by}"
    )


def after_dense_layers(config: HfConfig, layer: int) -> bool:
    """Whether a layer has experts in a model whose first `first_k_dense_replace` layers have none."""
    return layer >= config.get("first_k_dense_replace", 0)


def sparse_layers(config: HfConfig, layer: int) -> bool:
    """Whether a layer has experts as the decoder layers of Qwen2-MoE and Qwen3-MoE in transformers decide."""
    return (
        layer not in (config.get("mlp_only_layers") or ())
        and need(config, "num_experts", "num_local_experts") > 0
        and (layer + 1) % config.get("decoder_sparse_step", 1) == 0
    )


def every_layer(config: HfConfig, layer: int) -> bool:
    return True


def mtp_names(config: HfConfig) -> str:
    """Multi-token-prediction layers come after the others and only serve speculative decoding."""
    first, count = need(config, "num_hidden_layers"), config.get("num_nextn_predict_layers") or 0
    layers = "|".join(map(str, range(first, first + count)))
    return rf"model\.layers\.({layers})\..*" if count else ""


def rope_of(config: HfConfig) -> dict[str, Any]:
    """The rotary embedding's settings with at least rope_type and rope_theta, in either of HF's spellings."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    return rope


def rope_theta_refusal(config: HfConfig) -> str:
    """For models in which no rope_theta does not mean 10000."""
    if "rope_theta" in (config.get("rope_parameters") or ()) or config.get("rope_theta"):
        return ""
    return "it lacks 'rope_theta'"


def partial_rotary_share(config: HfConfig, default: float) -> float:
    """partial_rotary_factor, in either of HF's places."""
    factor = rope_of(config).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    return default if factor is None else float(factor)
