"""Tiny random models of every family; transformers, which saves them, is the oracle of a family."""

import json
from pathlib import Path
from typing import Any

import torch

VOCAB = 99
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
}
GROUPED_QUERIES = {"num_key_value_heads": 2, "head_dim": 16}
DELTA_NET = {
    **GROUPED_QUERIES,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}
SHARED_EXPERT = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 4,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64,
    },
}
UNGROUPED = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "num_nextn_predict_layers": 0}
MAMBA = {
    **GROUPED_QUERIES,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 4,
    "ssm_state_size": 16,
    "chunk_size": 8,
    "time_step_min": 1e-30,  # transformers raises steps to it, which no other code does
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
}
BIASED_ROUTING = {
    **UNGROUPED,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
}
# With few heads, all of them may score 0 for several keys, between which the choice is arbitrary.
INDEXER = {"index_topk": 6, "index_n_heads": 16, "index_head_dim": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **GROUPED_QUERIES,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
        },
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "num_key_value_heads": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 128,
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
        },
    ),
    "mixtral": (
        "MixtralConfig",
        {
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "olmoe": (
        "OlmoeConfig",
        {
            "pad_token_id": None,  # else the embedding of a token is 0, and its gradient enormous
            "num_key_value_heads": 4,
            "intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            **GROUPED_QUERIES,
            **BIASED_ROUTING,
            "attention_bias": True,
            "use_qk_norm": True,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {
            **GROUPED_QUERIES,
            "intermediate_size": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            **GROUPED_QUERIES,
            "intermediate_size": 64,  # SGLang on CPU cuts by 32
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
            "sliding_window": 8,
            "swiglu_limit": 0.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen3": ("Qwen3Config", GROUPED_QUERIES),
    "qwen2": ("Qwen2Config", {"num_key_value_heads": 2}),
    "llama": (
        "LlamaConfig",
        {
            **GROUPED_QUERIES,
            "max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **LATENT,
            "q_lora_rank": 24,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 0,
        },
    ),
    "moonlight": (
        "DeepseekV3Config",
        {
            **LATENT,
            **UNGROUPED,
            "q_lora_rank": None,
            "num_experts_per_tok": 6,
            "routed_scaling_factor": 2.446,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        },
    ),
    "kimi_k2": (
        "DeepseekV3Config",
        {
            **LATENT,
            **UNGROUPED,
            "q_lora_rank": 24,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.827,
            "rope_parameters": {
                **LATENT["rope_parameters"],
                "rope_theta": 50000.0,
                "factor": 32.0,
                "beta_fast": 1.0,
                "beta_slow": 1.0,
            },
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {
            **LATENT,
            **UNGROUPED,
            "q_lora_rank": 24,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "rms_norm_eps": 1e-6,  # norms of latents have it in transformers whatever it says
        },
    ),
    "hunyuan_v3": (
        "HYV3Config",
        {
            **GROUPED_QUERIES,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "num_shared_experts": 1,
            "router_scaling_factor": 2.826,
            "rope_parameters": {"rope_type": "default", "rope_theta": 11158840.0},
        },
    ),
    "qwen3_next": ("Qwen3NextConfig", {**DELTA_NET, **SHARED_EXPERT, "norm_topk_prob": True}),
    "qwen3_5": ("Qwen3_5TextConfig", DELTA_NET),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**DELTA_NET, **SHARED_EXPERT}),
    "nemotron3": ("NemotronHConfig", {**MAMBA, "hybrid_override_pattern": "MEM*E-ME"}),
    "nemotron3_latent": (
        "NemotronHConfig",
        {**MAMBA, "hybrid_override_pattern": "MEM*", "moe_latent_size": 40},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            **LATENT,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
        },
    ),
    "deepseek_v32": (
        "DeepseekV32Config",
        {
            **LATENT,
            **INDEXER,
            "q_lora_rank": 24,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 0,
        },
    ),
    "glm5": (
        "GlmMoeDsaConfig",
        {
            **LATENT,
            **UNGROUPED,
            **INDEXER,
            "q_lora_rank": 24,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "rms_norm_eps": 1e-6,  # norms of latents have it in transformers whatever it says
            "indexer_rope_interleave": True,
        },
    ),
}
EVERY_FOURTH = {"full_attention_interval": 4}
DEEPSEEK_V3 = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
LAYERS_BY_PATTERN = {
    "layers_block_type": None,
    "mtp_layers_block_type": None,
    "mamba_n_groups": MAMBA["n_groups"],
}
SAVED_ELSEWHERE: dict[str, dict[str, Any]] = {
    "deepseek_v3": DEEPSEEK_V3,
    "moonlight": DEEPSEEK_V3,
    "kimi_k2": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_V3,
    "glm5": DEEPSEEK_V3,
    "glm4_moe_lite": {"topk_method": "noaux_tc"},
    "hunyuan_v3": {"first_k_dense_replace": 1, "qk_norm": True, "route_norm": True},
    "deepseek_v2": {"scoring_func": "softmax", "moe_layer_freq": 1},
    "qwen3_next": EVERY_FOURTH,
    "qwen3_5": EVERY_FOURTH,
    "qwen3_5_moe": EVERY_FOURTH,
    "nemotron3": {
        **LAYERS_BY_PATTERN,
        "hybrid_override_pattern": "MEM*E-ME",
        "num_hidden_layers": 8,
    },
    "nemotron3_latent": {
        **LAYERS_BY_PATTERN,
        "hybrid_override_pattern": "MEM*",
        "num_hidden_layers": 4,
    },
    "minimax_m2": {
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
        "rotary_dim": 8,
    },
}
"""Entries of the published config.json that SGLang needs and transformers does not save."""


def write_model(kind: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Save a random model of family `kind` whose norms are not 1 and whose biases are not 0."""
    import transformers

    class_name, settings = MODELS[kind]
    config = getattr(transformers, class_name)(**{**SIZES, **settings, **changes})
    torch.manual_seed(seed)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    saved_names = model.state_dict().keys()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if (tensor.dim() == 1 or name.endswith("_bias")) and name in saved_names:
                tensor.add_(0.1 * torch.randn(tensor.shape))
            if name.endswith("sinks"):
                tensor.copy_(tensor.bfloat16())  # engines hold them in bfloat16
    model.save_pretrained(folder)
    path = folder / "config.json"
    saved = json.loads(path.read_text()) | SAVED_ELSEWHERE.get(kind, {})
    if "rope_parameters" in saved:
        rope = dict(saved["rope_parameters"])
        saved["rope_theta"] = rope.pop("rope_theta")
        if rope["rope_type"] != "default":
            saved["rope_scaling"] = rope | {"type": rope["rope_type"]}
    path.write_text(json.dumps(saved, indent=2))
    return folder


def write_reward_model(kind: str, folder: Path) -> Path:
    """Save a random reward model of family `kind` with the tokenizer of the arithmetic data."""
    import transformers

    from mcore_rl.tasks.arithmetic import make_tokenizer, vocabulary

    class_name, settings = MODELS[kind]
    head = {"num_labels": 1, "pad_token_id": 0, "vocab_size": len(vocabulary())}
    config = getattr(transformers, class_name)(**{**SIZES, **settings, **head})
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForSequenceClassification.from_config(
        config, dtype=torch.float32
    )
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
