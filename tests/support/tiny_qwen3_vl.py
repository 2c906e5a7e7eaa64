"""Tiny random Qwen3-VL directories, dense and with experts; images as in tiny_vision.py."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_vision import END, PLACEHOLDER, START, VIDEO, VOCAB

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.04,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_heads": 2,
    "patch_size": 16,
    "out_hidden_size": 64,
    "num_position_embeddings": 25,  # 5 x 5, of which no image here has as many
    "deepstack_visual_indexes": [0, 1, 3],  # SGLang's model with experts takes three
    "initializer_range": 0.04,
}


def write_qwen3_vl_model(
    folder: Path, seed: int = 0, vision: Mapping[str, Any] | None = None, **text: Any
) -> Path:
    """Save a random dense model: 4 layers, and a tower of 4 blocks of which 3 have projectors.

    `vision` changes settings of the tower, `text` those of the language model.
    """
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    return _write(folder, seed, Qwen3VLConfig, Qwen3VLForConditionalGeneration, vision, text)


def write_qwen3_vl_moe_model(
    folder: Path, seed: int = 0, vision: Mapping[str, Any] | None = None, **text: Any
) -> Path:
    """Save the same with experts in every layer, as the published files have them.

    transformers reads experts either way round, but writes them as its own modules have them.
    """
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    classes = (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration)
    _write(folder, seed, *classes, vision, {**EXPERTS, **text})
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def like_qwen3_vl(source: Path, folder: Path, *, experts: bool) -> Path:
    """Copy a tiny Qwen2.5-VL directory without weights; its config becomes one of Qwen3-VL."""
    from transformers import Qwen3VLConfig, Qwen3VLMoeConfig

    shutil.copytree(source, folder)
    old = json.loads((source / "config.json").read_text())
    text = {"vocab_size": old["text_config"]["vocab_size"], "bos_token_id": None}
    text |= {"eos_token_id": old["eos_token_id"]} | (EXPERTS if experts else {})
    config: Any = (Qwen3VLMoeConfig if experts else Qwen3VLConfig)(
        text_config={**TEXT, **text, "tie_word_embeddings": False},
        vision_config=VISION,
        **{key: value for key, value in old.items() if key.endswith("_token_id")},
        architectures=[f"Qwen3VL{'Moe' if experts else ''}ForConditionalGeneration"],
        dtype="float32",
    )
    config.save_pretrained(folder)
    processor = json.loads((source / "preprocessor_config.json").read_text())
    processor |= {"patch_size": 16, "processor_class": "Qwen3VLProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def _write(
    folder: Path,
    seed: int,
    config_class: Any,
    model_class: Any,
    vision: Mapping[str, Any] | None,
    text: Mapping[str, Any],
) -> Path:
    text = dict(text)
    tied = text.pop("tie_word_embeddings", False)
    config = config_class(
        text_config={**TEXT, **text, "tie_word_embeddings": tied},
        vision_config={**VISION, **(vision or {})},
        image_token_id=PLACEHOLDER,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
            elif ".gate.weight" in name or ".experts." in name:
                parameter.normal_(std=0.04)
    model.save_pretrained(folder)
    return folder
