"""A tiny random Kimi-K2.5 directory, its experts in INT4 as compressed-tensors packs them."""

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.quantized_models import INT4
from tests.support.tiny_kimi_vl import VISION, tower_shapes
from tests.support.tiny_models import write_model

LANGUAGE = "language_model."
PROJECTOR = {
    "multi_modal_projector.pre_norm": "mm_projector.pre_norm",
    "multi_modal_projector.linear_1": "mm_projector.proj.0",
    "multi_modal_projector.linear_2": "mm_projector.proj.2",
}
"""Names of Kimi-VL's projector -> those of the published Kimi-K2.5."""
PUBLISHED_VISION: dict[str, Any] = {
    "init_pos_emb_height": 4,
    "init_pos_emb_time": 4,
    "init_pos_emb_width": 4,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mm_hidden_size": 32,
    "mm_projector_type": "patchmerger",
    "model_type": "",
    "patch_size": 14,
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-05,
    "text_hidden_size": 64,
    "video_attn_type": "spatial_temporal",
    "vt_hidden_size": 32,
    "vt_intermediate_size": 40,
    "vt_num_attention_heads": 2,
    "vt_num_hidden_layers": 2,
}
"""The keys that the published vision_config has."""


def write_kimi_k25_model(folder: Path, **text: Any) -> Path:
    """Save a random model; `text` changes settings of its language model."""
    write_model("kimi_k2", folder, **{"moe_intermediate_size": 64, **text})
    (folder / "generation_config.json").unlink(missing_ok=True)
    path = folder / "model.safetensors"
    weights: dict[str, Tensor] = {}
    for name, tensor in load_file(path).items():
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        if ".experts." in name:
            weights |= pack(LANGUAGE + name, tensor.to(torch.bfloat16))
        else:
            weights[LANGUAGE + name] = tensor.to(dtype)
    weights |= make_image_parts()
    save_file(weights, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    vocab = config["vocab_size"]
    nested = config | {"dtype": "bfloat16", "quantization_config": INT4}
    whole = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "media_placeholder_token_id": vocab - 1,
        "tie_word_embeddings": False,
        "text_config": nested,
        "vision_config": PUBLISHED_VISION,
    }
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def pack(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Pack a matrix by scales a little larger than the formula's, as training chooses them."""
    arguments = QuantizationArgs(num_bits=4, group_size=32, strategy="group", symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    scale = weight.unflatten(-1, (-1, 32)).abs().amax(-1).float() / 7
    scale *= 1 + 0.2 * torch.rand(scale.shape)
    state = {"weight": weight, "weight_scale": scale.to(torch.bfloat16)}
    packed = PackedQuantizationCompressor.compress(state, scheme)
    packed["weight_shape"] = packed["weight_shape"].to(torch.int32)  # as published
    return {name.removesuffix("weight") + part: tensor for part, tensor in packed.items()}


def unpack_all(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a directory's tensors with the library's matrices in place of the packed ones."""
    arguments = QuantizationArgs(num_bits=4, group_size=32, strategy="group", symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    parts = ("weight_packed", "weight_scale", "weight_shape")
    plain = {name: t for name, t in weights.items() if not name.endswith(parts)}
    for name in weights:
        if name.endswith("weight_packed"):
            stem = name.removesuffix("weight_packed")
            state = {part: weights[stem + part] for part in parts}
            made = PackedQuantizationCompressor.decompress(state, scheme)
            plain[stem + "weight"] = made["weight"]
    return plain


def make_image_parts() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    parts: dict[str, Tensor] = {}
    for name, shape in tower_shapes(VISION, 64).items():
        module, _, kind = name.rpartition(".")
        noise = 0.05 * torch.randn(shape, generator=generator)
        parts[f"{PROJECTOR.get(module, module)}.{kind}"] = noise.to(torch.bfloat16)
    return parts
