"""The parts that models are made of, by the keys of config.json that tell of them.

Whether a part is known is not written here: a table knows it if it reads one of the keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROWS = "rows of the table for its tensors"
MODULE = "a module in mcore_rl/train/model.py where megatron-core's layer has none"


@dataclass(frozen=True)
class PartRule:
    """A part of a model.

    keys       keys of config.json; a model with the part gives one of them a value
    to_write   what has to be written where no table reads any of the keys
    """

    name: str
    keys: tuple[str, ...]
    to_write: str


DENSE_MLP = "dense MLP"
PARTS = (
    PartRule("embedding and output layer", ("vocab_size", "tie_word_embeddings"), ROWS),
    PartRule("heads of attention", ("num_attention_heads", "num_key_value_heads"), ROWS),
    PartRule("latent attention", ("kv_lora_rank",), ROWS),
    PartRule("biases of attention", ("attention_bias", "qkv_bias", "use_bias"), ROWS),
    PartRule("norms of queries and keys", ("use_qk_norm", "qk_layernorm"), ROWS),
    PartRule(
        "rotary embedding",
        ("rope_theta", "rope_scaling", "rope_parameters", "rotary_dim", "partial_rotary_factor"),
        "its kind among rope_types, and its settings in the table's options",
    ),
    PartRule(
        "attention in a window or in chunks",
        ("sliding_window", "use_sliding_window", "attention_chunk_size", "layer_types"),
        "window_size and window_attn_skip_freq in the table's options, as gpt_oss.py has them",
    ),
    PartRule(
        "layers without a rotary embedding",
        ("no_rope_layers", "no_rope_layer_interval", "nope_layer_interval"),
        f"no_rope_freq in the table's options, or {MODULE}",
    ),
    PartRule("a gate on attention's output", ("attn_output_gate",), f"{ROWS}, and {MODULE}"),
    PartRule(
        "gated delta nets",
        ("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim"),
        f"{ROWS}, layers of that kind in the layer specification, and a stand-in of the engine's"
        " kernel in mcore_rl/cpu",
    ),
    PartRule(
        "other linear attention",
        ("linear_attn_config", "attn_type_list", "lightning_attn"),
        f"{ROWS}, {MODULE}, and a stand-in of the engine's kernel in mcore_rl/cpu",
    ),
    PartRule(
        "attention to keys that an indexer chooses",
        (
            *("index_topk", "index_n_heads", "index_head_dim"),
            *("sparse_attention_config", "indexer_n_heads"),
        ),
        f"{ROWS}, and {MODULE} that attends to the chosen keys alone",
    ),
    PartRule(
        "several residual streams that layers mix (hyper-connections)",
        ("hc_mult", "hc_count"),
        f"{ROWS}, and a layer of its own in mcore_rl/train/model.py",
    ),
    PartRule("embeddings of n-grams in layers", ("ple_layer_ids",), f"{ROWS}, and {MODULE}"),
    PartRule(
        "Mamba",
        ("mamba_num_heads", "mamba_d_state", "ssm_state_size", "hybrid_override_pattern"),
        f"{ROWS}, a hybrid model in place of GPTModel, and a stand-in of the scan in mcore_rl/cpu",
    ),
    PartRule(
        "capped or rescaled scores",
        (
            *("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"),
            *("logit_scale", "logits_scaling", "attention_multiplier", "residual_multiplier"),
            *("embedding_multiplier", "scale_emb"),
        ),
        f"an argument in the table's options where megatron-core has one, else {MODULE}",
    ),
    PartRule(DENSE_MLP, ("intermediate_size",), ROWS),
    PartRule(
        "routed experts",
        (
            *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
            *("num_experts_per_tok", "moe_intermediate_size", "moe_topk"),
        ),
        f"{ROWS}: rules.experts(<module>, <gate and up>, <down>)",
    ),
    PartRule(
        "shared experts",
        ("n_shared_experts", "shared_expert_intermediate_size", "num_shared_experts"),
        f"{ROWS}: rules.make_shared_expert_rules(<module>)",
    ),
    PartRule(
        "how experts are scored and chosen",
        (
            *("scoring_func", "topk_method", "norm_topk_prob", "n_group", "topk_group"),
            *("routed_scaling_factor", "use_routing_bias", "moe_router_activation_func"),
        ),
        "moe_router_... in the table's options",
    ),
    PartRule(
        "which layers have experts",
        ("first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers", "moe_layer_freq"),
        "the table's is_moe_layer",
    ),
    PartRule("experts of a smaller width than the model", ("moe_latent_size",), MODULE),
    PartRule(
        "layers for multi-token prediction",
        ("num_nextn_predict_layers", "mtp_num_hidden_layers"),
        "the table's `carried`, so that exports get their tensors unchanged",
    ),
    PartRule(
        "a vision tower",
        ("vision_config",),
        "rules of the tower and its module in mcore_rl/train/vision, or the names of its tensors in"
        " the table's `carried`, to train the language model alone",
    ),
    PartRule("audio", ("audio_config", "speech_config"), "its tensors' names in `carried`"),
)

SILENT = (
    *("architectures", "auto_map", "model_type", "transformers_version", "torch_dtype", "dtype"),
    *("_name_or_path", "name_or_path", "use_cache", "initializer_range", "id2label", "label2id"),
    *("return_dict", "is_decoder", "is_encoder_decoder", "prefix", "problem_type"),
    *("tokenizer_class", "task_specific_params", "pretraining_tp", "ep_size", "seq_aux"),
    *("aux_loss_alpha", "router_aux_loss_coef", "output_router_logits", "max_window_layers"),
    *("max_position_embeddings", "quantization_config", "text_config", "chunk_size_feed_forward"),
    *("_attn_implementation", "attn_implementation", "ignore_index", "max_length", "torchscript"),
    *(
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "use_bfloat16",
        "pruned_heads",
        "add_cross_attention",
    ),
    *(
        "finetuning_task",
        "cross_attention_hidden_size",
        "output_attentions",
        "output_hidden_states",
    ),
)
"""Keys that do not change what a model computes, or that are read elsewhere than by tables."""
SILENT_ENDINGS = (
    "_token_id",
    "_token_ids",
    "_dropout",
    "_pdrop",
    "_prob",
    "_token",
    "_placeholder",
)


def is_off(value: Any) -> bool:
    """Return whether a setting has a value that stands for nothing."""
    if isinstance(value, list):
        return set(map(str, value)) <= {"full_attention"}
    return value in (None, False, 0, "", "none", {})


def is_silent(key: str, value: Any) -> bool:
    """Return whether a setting says nothing of what the model computes."""
    return is_off(value) or key in SILENT or key.endswith(SILENT_ENDINGS)


def has_dense_layers(config: Mapping[str, Any]) -> bool:
    """Return whether a layer has a dense MLP: one without experts, or one of these exceptions."""
    if is_off(config.get("moe_intermediate_size")):
        return True
    every = config.get("decoder_sparse_step", 1)
    exceptions = ("first_k_dense_replace", "mlp_only_layers", "moe_layer_freq")
    return every != 1 or any(config.get(key) for key in exceptions)


def list_present(config: Mapping[str, Any]) -> list[PartRule]:
    """Return the parts that a model with this config.json has."""
    return [part for part in PARTS if not all(is_off(config.get(key)) for key in part.keys)]
