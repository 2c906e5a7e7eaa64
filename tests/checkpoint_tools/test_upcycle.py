"""A dense model made sparse computes what it did, tensor by tensor made of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoint_tools.cli import main
from checkpoint_tools.opening import open_checkpoint
from checkpoint_tools.upcycle import EXPERTS_OF, sparse_config, upcycle
from mcore_rl.weights.hf.config import read_hf_config
from mcore_rl.weights.models import hf_tensor_shapes
from tests.support.small_hf import LARGE, ONE_WORKER
from tests.support.tiny_models import VOCAB, write_model


def logits_of(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3", {"tie_word_embeddings": True}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
    ],
)
def test_outputs_are_equal_at_the_start(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    dense = write_model(kind, tmp_path / "dense", **changes)
    out = tmp_path / "sparse"
    upcycle(dense, out, experts=4, top_k=2, seed=0, max_file_bytes=LARGE, effort=ONE_WORKER)
    config = read_hf_config(out)
    tensors = open_checkpoint(out).tensors
    assert {name: tensor.shape for name, tensor in tensors.items()} == hf_tensor_shapes(config)
    assert (logits_of(out) - logits_of(dense)).abs().max() < 1e-5
    routers = [tensor for name, tensor in tensors.items() if name.endswith("gate.weight")]
    assert len(routers) == 4 and all(router.shape == (4, 64) for router in routers)
    assert not list(tmp_path.glob("*routers*"))


@pytest.mark.parametrize("architecture", EXPERTS_OF)
def test_the_settings_are_those_of_the_family_with_experts(architecture: str) -> None:
    config = {
        "architectures": [architecture],
        "intermediate_size": 96,
        "tie_word_embeddings": True,
        "vocab_size": 99,
    }
    settings = sparse_config(config, experts=4, top_k=2)
    assert settings["architectures"] == [EXPERTS_OF[architecture]]
    assert (settings["num_experts_per_tok"], settings["vocab_size"]) == (2, 99)
    assert settings["tie_word_embeddings"] is False
    assert settings.get("num_experts", settings.get("num_local_experts")) == 4
    assert config["architectures"] == [architecture]


def test_what_cannot_be_upcycled_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    qwen2, llama3 = (
        write_model("qwen2", tmp_path / "qwen2"),
        write_model("llama", tmp_path / "llama3"),
    )
    for source, options, message in (
        (qwen2, [], "Qwen2ForCausalLM has no counterpart with experts here"),
        (llama3, [], "rope_type='llama3' in the config.json to be of"),
        (
            llama3,
            ["--experts", "2", "--top-k", "3"],
            "--experts=2 --top-k=3: take two experts or more",
        ),
        (tmp_path, [], "config.json does not exist"),
    ):
        assert main(["upcycle", str(source), str(tmp_path / "out"), *options]) == 2
        assert message in capsys.readouterr().err
