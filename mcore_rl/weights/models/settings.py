"""Turns config.json into axis sizes and arguments of TransformerConfig that families share.

    sizes      {"hidden": 2048, "q": 4096, ...}             names of axes in a family's rules
    options    {"hidden_size": 2048, "kv_channels": 128}    megatron-core's TransformerConfig

Each family combines those that it needs.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

from mcore_rl.weights.hf import int4
from mcore_rl.weights.models.mtp import TRAINED, list_copies
from mcore_rl.weights.models.table import HfConfig

PLAIN_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
}
"""Settings that no family here supports in another value; see `Family.supported`."""

LENGTHENED = ("llama3", "yarn", "longrope")
"""Kinds of rotary embedding that know the length which the model was first trained for."""

DEQUANTIZABLE = ("fp8", "mxfp4")
"""The quant_method values that `mcore-rl-ckpt dequantize` converts."""
DEQUANTIZE_REMEDY = (
    "write its weights in bfloat16 first: mcore-rl-ckpt dequantize <this directory> <another>"
)


def drop_quantization(config: HfConfig) -> dict[str, Any]:
    """Return config.json of the same model with plain weights."""
    plain = {key: value for key, value in config.items() if key != int4.KEY}
    if isinstance(plain.get(int4.TEXT), Mapping):
        plain[int4.TEXT] = {k: v for k, v in plain[int4.TEXT].items() if k != int4.KEY}
    return plain


def put_quantization_back(config: HfConfig, source: HfConfig) -> dict[str, Any]:
    """Return config.json with the quantization that `source` has, in the same places."""
    settings = dict(config)
    if int4.KEY in source:
        settings[int4.KEY] = source[int4.KEY]
    text = source.get(int4.TEXT)
    if isinstance(text, Mapping) and int4.KEY in text:
        settings[int4.TEXT] = {**config[int4.TEXT], int4.KEY: text[int4.KEY]}
    return settings


def refuse_quantized(config: HfConfig, file: object) -> None:
    """Raise ValueError with a remedy if the weights of the model in `file` are quantized."""
    settings = config.get("quantization_config")
    if settings is None:
        return
    method = settings.get("quant_method") if isinstance(settings, Mapping) else settings
    remedy = DEQUANTIZE_REMEDY
    if method not in DEQUANTIZABLE:
        convertible = " and ".join(map(repr, DEQUANTIZABLE))
        remedy = f"take its plain weights, for only {convertible} can be converted"
        if different := int4.find_int4_problem(config):
            remedy += f", and INT4 as Kimi-K2.5 has it, not {different}"
    raise ValueError(
        f"the model of {file} is quantized (quantization_config, quant_method={method!r}): {remedy}"
    )


def need(config: HfConfig, *keys: str) -> Any:
    """Return the value of the first of `keys` that config.json has.

    Raises ValueError naming the first key if it has none of them.
    """
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise ValueError(
        f"config.json of {(config.get('architectures') or ['a model'])[0]} lacks {keys[0]!r}"
    )


def read_base_sizes(config: HfConfig) -> dict[str, int]:
    """Return the sizes that every family has; a family with experts overrides the last two."""
    return {
        "vocab": need(config, "vocab_size"),
        "hidden": need(config, "hidden_size"),
        "layers": need(config, "num_hidden_layers"),
        "dense_ffn": need(config, "intermediate_size"),
        "experts": 0,
        "expert_ffn": 0,
        "mtp_layers": config.get(TRAINED, 0),
        "mtp_in": 2 * need(config, "hidden_size"),
    }


QkNorm = Literal["none", "head", "projection"]
"""Over what queries and keys are normalized: nothing, each head, or the whole projection."""


def read_grouped_query_sizes(
    config: HfConfig, *, qk_norm: QkNorm = "none", qkv_bias: bool = False
) -> dict[str, int]:
    """Return the sizes of grouped-query attention. A size of 0 leaves the norm or bias out."""
    heads = need(config, "num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or need(config, "hidden_size") // heads
    q = heads * head
    kv = kv_heads * head
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


def read_latent_sizes(config: HfConfig) -> dict[str, int]:
    """Return the sizes of latent attention. Without q_lora_rank, q_proj is one matrix."""
    heads = need(config, "num_attention_heads")
    kv_rank = need(config, "kv_lora_rank")
    nope = need(config, "qk_nope_head_dim")
    rope = need(config, "qk_rope_head_dim")
    q_rank = config.get("q_lora_rank") or 0
    value = need(config, "v_head_dim")
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


def make_base_options(config: HfConfig) -> dict[str, Any]:
    """Return the arguments of TransformerConfig that every family needs."""
    return {
        "num_layers": need(config, "num_hidden_layers"),
        "hidden_size": need(config, "hidden_size"),
        "ffn_hidden_size": need(config, "intermediate_size"),
        "num_attention_heads": need(config, "num_attention_heads"),
        "layernorm_epsilon": need(config, "rms_norm_eps"),
    }


def make_grouped_query_options(sizes: Mapping[str, int]) -> dict[str, Any]:
    return {
        "num_query_groups": sizes["kv_heads"],
        "kv_channels": sizes["head"],
        "qk_layernorm": sizes["q_norm"] > 0,
        "add_qkv_bias": sizes["q_bias"] > 0,
    }


def make_latent_options(config: HfConfig) -> dict[str, Any]:
    """Return the arguments of latent attention and of its rotary embedding, plain or YaRN."""
    rope = read_rope(config)
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


def make_expert_options(config: HfConfig, sizes: Mapping[str, int]) -> dict[str, Any]:
    return {
        "num_moe_experts": sizes["experts"],
        "moe_ffn_hidden_size": sizes["expert_ffn"],
        "moe_router_topk": need(config, "num_experts_per_tok"),
    }


def read_shared_expert_sizes(config: HfConfig) -> dict[str, int]:
    """Return the sizes of experts by DeepSeek's key names; all shared experts are one MLP."""
    expert_ffn = need(config, "moe_intermediate_size")
    return {
        "experts": need(config, "n_routed_experts", "num_local_experts"),
        "expert_ffn": expert_ffn,
        "shared_ffn": expert_ffn * (config.get("n_shared_experts") or 0),
    }


def make_shared_expert_options(config: HfConfig, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the arguments of routed and shared experts by DeepSeek's key names."""
    options = {
        **make_expert_options(config, sizes),
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
"""Arguments of a router that scores by sigmoid and chooses with a bias.

The update rate of 0 keeps Megatron itself from changing the bias.
"""


def find_group_refusal(config: HfConfig, scored_by: int) -> str:
    """Return why Megatron would score groups of experts differently, or "" if it would not.

    megatron-core scores a group by the sum of its best top_k // topk_group experts, the model by
    its best `scored_by`.
    """
    if (config.get("n_group") or 1) == 1:
        return ""
    top_k = need(config, "num_experts_per_tok")
    groups = need(config, "topk_group")
    if top_k // groups == scored_by:
        return ""
    return (
        f"num_experts_per_tok={top_k} and topk_group={groups}: Megatron would score a group of"
        f" experts by its best {top_k // groups}, the model by its best {scored_by}"
    )


def is_after_dense_layers(config: HfConfig, layer: int) -> bool:
    """Return whether a layer has experts if the first `first_k_dense_replace` layers are dense."""
    return layer >= (config.get("first_k_dense_replace") or 0)


def find_mlp_types_refusal(config: HfConfig) -> str:
    """Return why `mlp_layer_types` is not what `first_k_dense_replace` says, or "" if it is.

    transformers reads the list, SGLang and the tables the number. A file without the number is
    refused as one that lacks it.
    """
    types = config.get("mlp_layer_types")
    if types is None or config.get("first_k_dense_replace") is None:
        return ""
    num_layers = need(config, "num_hidden_layers")
    wanted = ["sparse" if is_after_dense_layers(config, i) else "dense" for i in range(num_layers)]
    if list(types) == wanted:
        return ""
    first = config.get("first_k_dense_replace")
    return f"mlp_layer_types={types!r:.80} is not what first_k_dense_replace={first} says"


def is_sparse_layer(config: HfConfig, layer: int) -> bool:
    """Return whether a layer of Qwen2-MoE or Qwen3-MoE has experts, by the rule of transformers."""
    return (
        layer not in (config.get("mlp_only_layers") or ())
        and need(config, "num_experts", "num_local_experts") > 0
        and (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0
    )


def is_any_layer(config: HfConfig, layer: int) -> bool:
    """Return whether a layer has experts in a model without dense layers."""
    return True


def match_mtp_names(config: HfConfig) -> str:
    """Return a pattern of the HF names in multi-token-prediction layers that are not trained.

    It is "" if there are none. These layers come after all others and only serve speculative
    decoding. If they are trained, it matches the copies in them.
    """
    if copies := list_copies(config):
        return "|".join(map(re.escape, copies))
    first = need(config, "num_hidden_layers")
    count = config.get("num_nextn_predict_layers") or 0
    layers = "|".join(map(str, range(first, first + count)))
    return rf"model\.layers\.({layers})\..*" if count else ""


def read_rope(config: HfConfig) -> dict[str, Any]:
    """Return the rotary embedding's settings, with at least rope_type and rope_theta.

    HuggingFace writes them as rope_parameters, in older files as rope_scaling. Of two, transformers
    reads rope_scaling as a whole (convert_rope_params_to_dict in its modeling_rope_utils.py), and
    an original_max_position_embeddings beside them before one in them.
    """
    rope = dict(_read_rope_in(config))
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    if rope["rope_type"] in LENGTHENED:
        beside = config.get("original_max_position_embeddings")
        if beside is not None:
            rope["original_max_position_embeddings"] = beside
    return rope


def _read_rope_in(config: HfConfig) -> Mapping[str, Any]:
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def find_rope_refusal(config: HfConfig) -> str:
    """Return why rotary settings cannot be read: each kind of layer has some of its own."""
    nested = [key for key, value in _read_rope_in(config).items() if isinstance(value, Mapping)]
    if nested:
        return f"its rotary settings differ by kind of layer: {', '.join(sorted(nested))}"
    return ""


def find_rope_theta_refusal(config: HfConfig) -> str:
    """Return why a model without rope_theta is refused: in its family the default is not 10000."""
    if "rope_theta" in _read_rope_in(config) or config.get("rope_theta"):
        return ""
    return "it lacks 'rope_theta'"


def read_rotary_share(config: HfConfig, default: float) -> float:
    """Return partial_rotary_factor, which config.json has beside the rotary settings or in them."""
    factor = read_rope(config).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    return default if factor is None else float(factor)
