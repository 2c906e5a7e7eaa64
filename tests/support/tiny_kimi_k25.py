"""A tiny random Kimi-K2.5 directory, its experts in INT4 as compressed-tensors packs them."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.quantized_models import INT4
from tests.support.tiny_kimi_vl import KIMI_K25_PROCESSOR, write_kimi_k25_model

LANGUAGE = "language_model."


def write_int4_kimi_k25_model(folder: Path, **text: Any) -> Path:
    """Save a random model; `text` changes settings of its language model."""
    write_kimi_k25_model(folder, **{"moe_intermediate_size": 64, **text})
    (folder / "generation_config.json").unlink(missing_ok=True)
    path = folder / "model.safetensors"
    weights: dict[str, Tensor] = {}
    for name, tensor in load_file(path).items():
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        if ".experts." in name:
            weights |= pack(name, tensor.to(torch.bfloat16))
        else:
            weights[name] = tensor.to(dtype)
    save_file(weights, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = config["text_config"]["dtype"] = "bfloat16"
    config["text_config"]["quantization_config"] = INT4
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def like_kimi_k25(source: Path, folder: Path) -> Path:
    """Save a random model in INT4 with the tokenizer of a tiny Qwen2.5-VL directory."""
    old = json.loads((source / "config.json").read_text())
    write_int4_kimi_k25_model(
        folder,
        vocab_size=old["text_config"]["vocab_size"],
        eos_token_id=old["eos_token_id"],
    )
    config = json.loads((folder / "config.json").read_text())
    config |= {"media_placeholder_token_id": old["image_token_id"]}
    config |= {"eos_token_id": old["eos_token_id"]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(KIMI_K25_PROCESSOR))
    for path in (*source.glob("*token*"), *source.glob("chat_template*")):
        shutil.copy(path, folder)
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
