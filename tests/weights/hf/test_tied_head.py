"""A tied output layer that is stored and differs is refused; transformers, the oracle, uses it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from checkpoint_tools.hf import open_hf
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.opened import open_hf_dir
from mcore_rl.weights.hf.tied_head import refuse_untied_head
from tests.support.tiny_models import write_model

HEAD, EMBEDDING, FILE = "lm_head.weight", "model.embed_tokens.weight", "model.safetensors"


def write_tied(folder: Path, head: torch.Tensor | None) -> Path:
    """Write a model with tied embeddings; `head` is added to the embeddings and stored."""
    write_model("qwen3", folder, tie_word_embeddings=True)
    tensors = load_file(folder / FILE)
    tensors.pop(HEAD, None)
    if head is not None:
        tensors[HEAD] = (tensors[EMBEDDING] + head).contiguous()
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    return folder


def test_an_equal_copy_is_accepted(tmp_path: Path) -> None:
    for name, head in (("without", None), ("with", torch.zeros(()))):
        folder = write_tied(tmp_path / name, head)
        assert HEAD not in open_hf_dir(ModelFacts.read(folder))
        assert open_hf(folder).facts["config"] == "Qwen3ForCausalLM"


def test_another_output_layer_is_refused_where_transformers_uses_it(tmp_path: Path) -> None:
    folder = write_tied(tmp_path, torch.ones(()))
    model = AutoModelForCausalLM.from_pretrained(folder)
    stored = load_file(folder / FILE)[HEAD]
    assert torch.equal(model.lm_head.weight.data, stored.to(model.lm_head.weight.dtype))
    message = rf"{FILE}: tensor '{HEAD}' differs from '{EMBEDDING}', .* tie_word_embeddings=false"
    with pytest.raises(ValueError, match=message):
        open_hf_dir(ModelFacts.read(folder))
    with pytest.raises(ValueError, match=message):
        open_hf(folder)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    assert HEAD in open_hf_dir(ModelFacts.read(folder)), "the remedy"


def test_dtypes_and_shapes_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / FILE
    config = ModelFacts.read(write_tied(tmp_path / "hf", None)).config
    embedding = torch.rand(5000, 3).bfloat16()
    save_file({EMBEDDING: embedding, HEAD: embedding.float()}, path)
    refuse_untied_head({EMBEDDING: path, HEAD: path}, config)
    refuse_untied_head({HEAD: path}, config)
    changed = embedding.float()
    changed[4999, 2] += 1
    for head in (changed, embedding[1:].clone()):
        save_file({EMBEDDING: embedding, HEAD: head}, path)
        with pytest.raises(ValueError, match="differs from"):
            refuse_untied_head({EMBEDDING: path, HEAD: path}, config)
