"""Small models in block FP8, MXFP4 and INT4, with every value and scale there is."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}

INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
}
"""quantization_config of the published Kimi-K2.5."""

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}

FOUR_MIB = ("--memory-budget", "4MiB")
"""The least that one worker takes: bands of 128 Ki elements."""


def write(folder: Path, tensors: dict[str, Tensor], quantization: Any, **settings: Any) -> Path:
    """A directory of an architecture that no table knows."""
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["SomebodysForCausalLM"], "torch_dtype": "bfloat16", **settings}
    config |= {"quantization_config": quantization} if quantization else {}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def random_bytes(*shape: int, most: int = 256) -> Tensor:
    return torch.randint(
        0, most, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


def random_mxfp4(name: str, experts: int, rows: int, groups: int) -> dict[str, Tensor]:
    """Every value and every scale there is."""
    halves = random_bytes(experts, rows, groups, 16), random_bytes(experts, rows, groups)
    return dict(zip((f"{name}_blocks", f"{name}_scales"), halves, strict=True))
