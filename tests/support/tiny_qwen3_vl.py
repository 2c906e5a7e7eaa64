"""Tiny random Qwen3-VL and Qwen3.5 directories, dense and with experts.

Images are those of tiny_vision.py.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_models import DELTA_NET, SHARED_EXPERT
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
DELTA_TEXT: dict[str, Any] = {
    **DELTA_NET,
    "num_attention_heads": 4,
    "head_dim": 32,
    "partial_rotary_factor": 0.5,  # SGLang reads it here, transformers below
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
NO_FEATURES: dict[str, Any] = {"deepstack_visual_indexes": []}
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


def write_qwen3_5_model(
    folder: Path, seed: int = 0, vision: Mapping[str, Any] | None = None, **text: Any
) -> Path:
    """Save a random dense model with gated delta nets and a tower without inner projectors."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    classes = (Qwen3_5Config, Qwen3_5ForConditionalGeneration)
    return _write_qwen3_5(folder, seed, *classes, vision, text)


def write_qwen3_5_moe_model(
    folder: Path, seed: int = 0, vision: Mapping[str, Any] | None = None, **text: Any
) -> Path:
    """Save the same with experts in every layer, stacked as in the published files.

    transformers reads both, but writes each expert by itself.
    """
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    classes = (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration)
    _write_qwen3_5(folder, seed, *classes, vision, {**SHARED_EXPERT, **text})
    file = folder / "model.safetensors"
    tensors = load_file(file)
    singles: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name in [name for name in tensors if ".experts." in name]:
        stem, _, rest = name.partition(".experts.")
        number, part, _ = rest.split(".")
        singles.setdefault(stem, {}).setdefault(int(number), {})[part] = tensors.pop(name)
    for stem, by_number in singles.items():
        experts = [by_number[number] for number in sorted(by_number)]
        gate_up = [torch.cat([each["gate_proj"], each["up_proj"]]) for each in experts]
        tensors[f"{stem}.experts.gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{stem}.experts.down_proj"] = torch.stack([each["down_proj"] for each in experts])
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def _write_qwen3_5(
    folder: Path,
    seed: int,
    config_class: Any,
    model_class: Any,
    vision: Mapping[str, Any] | None,
    text: Mapping[str, Any],
) -> Path:
    tower = {**(vision or {}), **NO_FEATURES}
    _write(folder, seed, config_class, model_class, tower, {**DELTA_TEXT, **text})
    return _add_what_sglang_needs(folder)


def _add_what_sglang_needs(folder: Path) -> Path:
    """Add the two settings of Qwen3.5 that transformers does not write."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["full_attention_interval"] = 4
    config["vision_config"] |= NO_FEATURES
    file.write_text(json.dumps(config))
    return folder


def like_qwen3_vl(source: Path, folder: Path, *, experts: bool) -> Path:
    """Copy a tiny Qwen2.5-VL directory without weights; its config becomes one of Qwen3-VL."""
    stem = "Qwen3VLMoe" if experts else "Qwen3VL"
    return _turn_config(source, folder, stem, EXPERTS if experts else {}, VISION)


def like_qwen3_5(source: Path, folder: Path, *, experts: bool) -> Path:
    """Do the same with a config of Qwen3.5."""
    stem = "Qwen3_5Moe" if experts else "Qwen3_5"
    text = DELTA_TEXT | (SHARED_EXPERT if experts else {})
    _turn_config(source, folder, stem, text, VISION | NO_FEATURES)
    return _add_what_sglang_needs(folder)


def _turn_config(
    source: Path, folder: Path, stem: str, text: Mapping[str, Any], vision: Mapping[str, Any]
) -> Path:
    """Copy a directory whose config becomes that of the architecture with this stem."""
    import transformers

    shutil.copytree(source, folder)
    old = json.loads((source / "config.json").read_text())
    tokens = {"vocab_size": old["text_config"]["vocab_size"], "bos_token_id": None}
    tokens |= {"eos_token_id": old["eos_token_id"]}
    config: Any = getattr(transformers, f"{stem}Config")(
        text_config={**TEXT, **tokens, **text, "tie_word_embeddings": False},
        vision_config=vision,
        **{key: value for key, value in old.items() if key.endswith("_token_id")},
        architectures=[f"{stem}ForConditionalGeneration"],
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
