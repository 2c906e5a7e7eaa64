"""The tensors of the published Kimi-K2.5: names, shapes and dtypes in its safetensors files.

A name's {} stand for the numbers in the ranges beside it.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

from tests.support.quantized_models import INT4

NUM_TENSORS = 208_550
GIB = 554.27
"""All tensors together."""
TEXT_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163585,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "pad_token_id": 163839,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": INT4,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 64.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
CONFIG: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163585,
    "ignore_index": -100,
    "media_placeholder_token_id": 163605,
    "pad_token_id": 163839,
    "tie_word_embeddings": False,
    "use_unified_vision_chunk": True,
    "video_placeholder": "<|kimi_k25_video_placeholder|>",
    "text_config": TEXT_CONFIG,
    "vision_config": {
        "init_pos_emb_height": 64,
        "init_pos_emb_time": 4,
        "init_pos_emb_width": 64,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mm_hidden_size": 1152,
        "mm_projector_type": "patchmerger",
        "patch_size": 14,
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-05,
        "text_hidden_size": 7168,
        "video_attn_type": "spatial_temporal",
        "vt_hidden_size": 1152,
        "vt_intermediate_size": 4304,
        "vt_num_attention_heads": 16,
        "vt_num_hidden_layers": 27,
    },
}
LAYER = "language_model.model.layers.{}."
EXPERT = LAYER + "mlp.experts.{}."
BLOCK = "vision_tower.encoder.blocks.{}."
ALL, DENSE, MOE = range(61), range(1), range(1, 61)
EXPERTS, BLOCKS = range(384), range(27)
BF16, F32, I32 = "bfloat16", "float32", "int32"

Row = tuple[str, tuple[range, ...], tuple[int, ...], str]
ROWS: tuple[Row, ...] = (
    ("language_model.lm_head.weight", (), (163840, 7168), BF16),
    ("language_model.model.embed_tokens.weight", (), (163840, 7168), BF16),
    ("language_model.model.norm.weight", (), (7168,), BF16),
    (LAYER + "input_layernorm.weight", (ALL,), (7168,), BF16),
    (LAYER + "post_attention_layernorm.weight", (ALL,), (7168,), BF16),
    (LAYER + "self_attn.kv_a_layernorm.weight", (ALL,), (512,), BF16),
    (LAYER + "self_attn.kv_a_proj_with_mqa.weight", (ALL,), (576, 7168), BF16),
    (LAYER + "self_attn.kv_b_proj.weight", (ALL,), (16384, 512), BF16),
    (LAYER + "self_attn.o_proj.weight", (ALL,), (7168, 8192), BF16),
    (LAYER + "self_attn.q_a_layernorm.weight", (ALL,), (1536,), BF16),
    (LAYER + "self_attn.q_a_proj.weight", (ALL,), (1536, 7168), BF16),
    (LAYER + "self_attn.q_b_proj.weight", (ALL,), (12288, 1536), BF16),
    (LAYER + "mlp.down_proj.weight", (DENSE,), (7168, 18432), BF16),
    (LAYER + "mlp.gate_proj.weight", (DENSE,), (18432, 7168), BF16),
    (LAYER + "mlp.up_proj.weight", (DENSE,), (18432, 7168), BF16),
    (EXPERT + "down_proj.weight_packed", (MOE, EXPERTS), (7168, 256), I32),
    (EXPERT + "down_proj.weight_scale", (MOE, EXPERTS), (7168, 64), BF16),
    (EXPERT + "down_proj.weight_shape", (MOE, EXPERTS), (2,), I32),
    (EXPERT + "gate_proj.weight_packed", (MOE, EXPERTS), (2048, 896), I32),
    (EXPERT + "gate_proj.weight_scale", (MOE, EXPERTS), (2048, 224), BF16),
    (EXPERT + "gate_proj.weight_shape", (MOE, EXPERTS), (2,), I32),
    (EXPERT + "up_proj.weight_packed", (MOE, EXPERTS), (2048, 896), I32),
    (EXPERT + "up_proj.weight_scale", (MOE, EXPERTS), (2048, 224), BF16),
    (EXPERT + "up_proj.weight_shape", (MOE, EXPERTS), (2,), I32),
    (LAYER + "mlp.gate.e_score_correction_bias", (MOE,), (384,), F32),
    (LAYER + "mlp.gate.weight", (MOE,), (384, 7168), BF16),
    (LAYER + "mlp.shared_experts.down_proj.weight", (MOE,), (7168, 2048), BF16),
    (LAYER + "mlp.shared_experts.gate_proj.weight", (MOE,), (2048, 7168), BF16),
    (LAYER + "mlp.shared_experts.up_proj.weight", (MOE,), (2048, 7168), BF16),
    ("mm_projector.pre_norm.bias", (), (1152,), BF16),
    ("mm_projector.pre_norm.weight", (), (1152,), BF16),
    ("mm_projector.proj.0.bias", (), (4608,), BF16),
    ("mm_projector.proj.0.weight", (), (4608, 4608), BF16),
    ("mm_projector.proj.2.bias", (), (7168,), BF16),
    ("mm_projector.proj.2.weight", (), (7168, 4608), BF16),
    (BLOCK + "mlp.fc0.bias", (BLOCKS,), (4304,), BF16),
    (BLOCK + "mlp.fc0.weight", (BLOCKS,), (4304, 1152), BF16),
    (BLOCK + "mlp.fc1.bias", (BLOCKS,), (1152,), BF16),
    (BLOCK + "mlp.fc1.weight", (BLOCKS,), (1152, 4304), BF16),
    (BLOCK + "norm0.bias", (BLOCKS,), (1152,), BF16),
    (BLOCK + "norm0.weight", (BLOCKS,), (1152,), BF16),
    (BLOCK + "norm1.bias", (BLOCKS,), (1152,), BF16),
    (BLOCK + "norm1.weight", (BLOCKS,), (1152,), BF16),
    (BLOCK + "wo.bias", (BLOCKS,), (1152,), BF16),
    (BLOCK + "wo.weight", (BLOCKS,), (1152, 1152), BF16),
    (BLOCK + "wqkv.bias", (BLOCKS,), (3456,), BF16),
    (BLOCK + "wqkv.weight", (BLOCKS,), (3456, 1152), BF16),
    ("vision_tower.encoder.final_layernorm.bias", (), (1152,), BF16),
    ("vision_tower.encoder.final_layernorm.weight", (), (1152,), BF16),
    ("vision_tower.patch_embed.pos_emb.weight", (), (64, 64, 1152), BF16),
    ("vision_tower.patch_embed.proj.bias", (), (1152,), BF16),
    ("vision_tower.patch_embed.proj.weight", (), (1152, 3, 14, 14), BF16),
)


def list_tensors() -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield (name, shape, dtype) of every tensor."""
    for pattern, ranges, shape, dtype in ROWS:
        for numbers in product(*ranges):
            yield pattern.format(*numbers), shape, dtype
