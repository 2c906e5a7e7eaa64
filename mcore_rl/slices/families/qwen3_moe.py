"""Qwen3-MoE: Megatron's tensors (Transformer Engine spec, grouped experts) in terms of HF tensors."""

from collections.abc import Mapping

from mcore_rl.slices.families.table import Family, HfConfig, HfTensor, Rule

LAYER = "decoder.layers."
EXPERTS = LAYER + "mlp.experts.experts."
HF_LAYER = "model.layers.{layer}."
HF_EXPERT = HF_LAYER + "mlp.experts.{expert}."


def sizes(config: HfConfig) -> Mapping[str, int]:
    """Axis sizes by the names used in RULES; ValueError names what is missing or unsupported."""
    if config.get("attention_bias"):
        raise ValueError("config.json has attention_bias = true, which the table of Qwen3-MoE lacks")
    try:
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return {
            "vocab": config["vocab_size"],
            "hidden": config["hidden_size"],
            "layers": config["num_hidden_layers"],
            "experts": config["num_experts"] if "num_experts" in config else config["num_local_experts"],
            "head": head_dim,
            "q": config["num_attention_heads"] * head_dim,
            "kv": config["num_key_value_heads"] * head_dim,
            "kv_heads": config["num_key_value_heads"],
            "dense_ffn": config["intermediate_size"],
            "expert_ffn": config["moe_intermediate_size"],
        }
    except KeyError as error:
        raise ValueError(f"config.json of a Qwen3-MoE model lacks {error.args[0]!r}") from error


def is_moe_layer(config: HfConfig, layer: int) -> bool:
    """As Qwen3MoeDecoderLayer in transformers decides it."""
    return (
        layer not in (config.get("mlp_only_layers") or ())
        and sizes(config)["experts"] > 0
        and (layer + 1) % config.get("decoder_sparse_step", 1) == 0
    )


def _plain(key: str, name: str, *axes: str) -> Rule:
    return Rule(LAYER + key, (HfTensor(HF_LAYER + name, axes),))


RULES = (
    Rule(
        "embedding.word_embeddings.weight",
        (HfTensor("model.embed_tokens.weight", ("vocab", "hidden")),),
        where="model",
        padded=True,
    ),
    Rule(
        "output_layer.weight", (HfTensor("lm_head.weight", ("vocab", "hidden")),), where="model", padded=True
    ),
    Rule("decoder.final_layernorm.weight", (HfTensor("model.norm.weight", ("hidden",)),), where="model"),
    _plain("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", "hidden"),
    Rule(
        LAYER + "self_attention.linear_qkv.weight",
        (
            HfTensor(HF_LAYER + "self_attn.q_proj.weight", ("q", "hidden")),
            HfTensor(HF_LAYER + "self_attn.k_proj.weight", ("kv", "hidden")),
            HfTensor(HF_LAYER + "self_attn.v_proj.weight", ("kv", "hidden")),
        ),
        groups="kv_heads",
    ),
    _plain("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "head"),
    _plain("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "head"),
    _plain("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "hidden", "q"),
    Rule(
        LAYER + "pre_mlp_layernorm.weight",
        (HfTensor(HF_LAYER + "post_attention_layernorm.weight", ("hidden",)),),
        where="moe",
    ),
    Rule(
        LAYER + "mlp.router.weight",
        (HfTensor(HF_LAYER + "mlp.gate.weight", ("experts", "hidden")),),
        where="moe",
    ),
    Rule(
        EXPERTS + "linear_fc1.weight",
        (
            HfTensor(HF_EXPERT + "gate_proj.weight", ("expert_ffn", "hidden")),
            HfTensor(HF_EXPERT + "up_proj.weight", ("expert_ffn", "hidden")),
        ),
        where="moe",
    ),
    Rule(
        EXPERTS + "linear_fc2.weight",
        (HfTensor(HF_EXPERT + "down_proj.weight", ("hidden", "expert_ffn")),),
        where="moe",
    ),
    Rule(
        LAYER + "mlp.linear_fc1.layer_norm_weight",
        (HfTensor(HF_LAYER + "post_attention_layernorm.weight", ("hidden",)),),
        where="dense",
    ),
    Rule(
        LAYER + "mlp.linear_fc1.weight",
        (
            HfTensor(HF_LAYER + "mlp.gate_proj.weight", ("dense_ffn", "hidden")),
            HfTensor(HF_LAYER + "mlp.up_proj.weight", ("dense_ffn", "hidden")),
        ),
        where="dense",
    ),
    Rule(
        LAYER + "mlp.linear_fc2.weight",
        (HfTensor(HF_LAYER + "mlp.down_proj.weight", ("hidden", "dense_ffn")),),
        where="dense",
    ),
)

FAMILY = Family(
    "Qwen3MoeForCausalLM", RULES, sizes, is_moe_layer, tied={"lm_head.weight": "model.embed_tokens.weight"}
)
