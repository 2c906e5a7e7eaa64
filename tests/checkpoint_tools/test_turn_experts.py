"""Experts of Qwen3-VL change between transformers' form and the published one, bit for bit."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_tools.cli import main
from checkpoint_tools.options import Effort
from checkpoint_tools.rewrite import turn_experts
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.opened import open_hf_dir
from tests.support.tiny_models import write_model
from tests.support.tiny_qwen3_vl import write_qwen3_5_moe_model, write_qwen3_vl_moe_model
from tests.support.tiny_vision import load_vision_model


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def turn(source: Path, out: Path) -> None:
    assert main(["turn-experts", str(source), str(out)]) == 0


def test_what_transformers_saves_becomes_the_published_form_and_back(tmp_path: Path) -> None:
    published = write_qwen3_vl_moe_model(tmp_path / "published")
    saved, again, back = (tmp_path / name for name in ("saved", "again", "back"))
    model: Any = load_vision_model(published)
    model.save_pretrained(saved)
    with pytest.raises(ValueError, match=r"experts\..*transposed.*mcore-rl-ckpt turn-experts"):
        open_hf_dir(ModelFacts.read(saved))
    turn(saved, again)
    open_hf_dir(ModelFacts.read(again))
    turn(again, back)
    for folder, wanted in ((again, published), (back, saved)):
        got, expected = tensors_of(folder), tensors_of(wanted)
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
        load_vision_model(folder)


def test_another_model_is_refused(tmp_path: Path) -> None:
    write_model("qwen3_moe", tmp_path / "model")
    with pytest.raises(ValueError, match="Qwen3MoeForCausalLM has one form of experts"):
        turn_experts(tmp_path / "model", tmp_path / "out", 1 << 30, Effort(1 << 20, 1))


def test_single_experts_of_qwen3_5_are_stacked_as_in_the_published_files(tmp_path: Path) -> None:
    published = write_qwen3_5_moe_model(tmp_path / "published")
    saved, again = tmp_path / "saved", tmp_path / "again"
    loaded: Any = load_vision_model(published)  # which would be saved as it was loaded
    model = type(loaded)(loaded.config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(saved)
    shutil.copy(published / "config.json", saved)
    assert any(".experts.7.up_proj." in name for name in tensors_of(saved))
    with pytest.raises(ValueError, match=r"experts\..*mcore-rl-ckpt turn-experts"):
        open_hf_dir(ModelFacts.read(saved))
    turn(saved, again)
    got, wanted = tensors_of(again), tensors_of(published)
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())
    open_hf_dir(ModelFacts.read(again))
    with pytest.raises(ValueError, match="its experts are stacked already"):
        turn_experts(again, tmp_path / "out", 1 << 30, Effort(1 << 20, 1))
    lacking = dict(tensors_of(saved))
    del lacking["model.language_model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(lacking, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.3\.up_proj"):
        turn_experts(saved, tmp_path / "out", 1 << 30, Effort(1 << 20, 1))
