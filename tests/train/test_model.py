"""Which parameters count as experts and in every rank's norm; the chunks of small models."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.config import ParallelConfig, TrainConfig
from mcore_rl.train.model import _mark_parameters, make_chunks
from mcore_rl.train.transformer_config import make_transformer_config
from mcore_rl.weights.hf.config import read_hf_config
from mcore_rl.weights.models.value_head import add_value_head
from tests.support.distributed import run_alone
from tests.support.tiny_models import VOCAB, write_model


def test_experts_and_sinks_are_marked() -> None:
    layer = torch.nn.Module()
    layer.experts = torch.nn.Linear(2, 2)
    layer.attention = torch.nn.Module()
    layer.attention.register_parameter("softmax_offset", torch.nn.Parameter(torch.zeros(2)))
    layer.norm = torch.nn.LayerNorm(2)
    chunk = torch.nn.Module()
    chunk.layer = layer
    _mark_parameters([chunk])
    marks = {
        name: (getattr(p, "allreduce", True), getattr(p, "tensor_model_parallel", False))
        for name, p in chunk.named_parameters()
    }
    assert marks == {
        "layer.experts.weight": (False, True),
        "layer.experts.bias": (False, True),
        "layer.attention.softmax_offset": (True, True),
        "layer.norm.weight": (True, False),
        "layer.norm.bias": (True, False),
    }


def describe(folder: Path, has_value_head: bool) -> dict[str, Any]:
    hf_config = read_hf_config(folder)
    if has_value_head:
        hf_config = add_value_head(hf_config)
    config = make_transformer_config(hf_config, ParallelConfig(), torch.float32, TrainConfig())
    (chunk,) = make_chunks(config, hf_config)
    return {name: tuple(p.shape) for name, p in chunk.named_parameters()}


@pytest.mark.parametrize("tied", [True, False])
def test_an_output_layer_is_tied_or_padded_like_the_embedding(tmp_path: Path, tied: bool) -> None:
    folder = write_model("qwen3", tmp_path, tie_word_embeddings=tied)
    shapes = run_alone(describe, folder, False)
    assert shapes["embedding.word_embeddings.weight"] == (128, 64) and VOCAB < 128
    assert shapes.get("output_layer.weight") == (None if tied else (128, 64))


def test_a_value_head_is_never_tied(tmp_path: Path) -> None:
    folder = write_model("qwen3", tmp_path, tie_word_embeddings=True)
    assert run_alone(describe, folder, True)["output_layer.weight"] == (1, 64)
