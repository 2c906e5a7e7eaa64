"""HuggingFace directories of a few kilobytes, written without transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint_tools.options import Effort
from mcore_rl.weights.models import hf_tensor_shapes
from tests.support.megatron_layout import model_config

ONE_WORKER = Effort(64 << 20, 1)
"""The tools then work in the process of the test."""
LARGE = 1 << 30
"""Bytes per file that none of these models exceeds."""


def write_small_model(folder: Path, **changes: Any) -> Path:
    """Write config.json, a tokenizer file and random bfloat16 weights of the model it describes."""
    config = model_config(dtype="bfloat16", **changes)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in hf_tensor_shapes(config).items()
    }
    return write_hf(folder, weights, **config)


def write_hf(folder: Path, weights: dict[str, Tensor], **config: Any) -> Path:
    """Write these weights and settings as a directory of one safetensors file."""
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def read_all(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a directory, by name."""
    weights: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        weights |= load_file(path)
    return weights


def assert_equal(first: Path, second: Path) -> None:
    """Check that two directories hold the same tensors, bit for bit, under the same names."""
    a = read_all(first)
    b = read_all(second)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name
