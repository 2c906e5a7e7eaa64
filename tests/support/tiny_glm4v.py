"""A tiny random GLM-4.5V directory, whose images and text are those of tiny_vision.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support.tiny_vision import (
    END,
    PLACEHOLDER,
    START,
    VIDEO,
    VIDEO_END,
    VIDEO_START,
    VOCAB,
)

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.08,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": VOCAB - 1,  # transformers gives padding no gradient
    "routed_scaling_factor": 1.5,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 3, 3],
        "partial_rotary_factor": 0.5,
    },
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "image_size": 70,  # 5 x 5 positions, of which no image here has as many
    "patch_size": 14,
    "out_hidden_size": 64,
    "intermediate_size": 40,
    "initializer_range": 0.08,
}


def write_glm4v_model(
    folder: Path, seed: int = 0, vision: Mapping[str, Any] | None = None, **text: Any
) -> Path:
    """Save a random model: a dense layer, 3 layers with experts, a tower of 2 blocks.

    `vision` changes settings of the tower, `text` those of the language model.
    """
    from transformers import Glm4vMoeConfig, Glm4vMoeForConditionalGeneration

    config: Any = Glm4vMoeConfig(
        text_config={**TEXT, **text},
        vision_config={**VISION, **(vision or {})},
        image_token_id=PLACEHOLDER,
        video_token_id=VIDEO,
        image_start_token_id=START,
        image_end_token_id=END,
        video_start_token_id=VIDEO_START,
        video_end_token_id=VIDEO_END,
    )
    torch.manual_seed(seed)
    model: Any = Glm4vMoeForConditionalGeneration(config)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.dim() == 1:
                noise = 0.1 * torch.randn(tensor.shape)
                tensor.add_(0.1 * noise if name.endswith("e_score_correction_bias") else noise)
    model.save_pretrained(folder)
    return folder
