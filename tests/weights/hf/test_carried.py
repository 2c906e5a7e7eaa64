"""Carried tensors are found by name and copied unchanged, in files of bounded size."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_rl.weights.hf.files import list_carried_tensors, write_carried
from mcore_rl.weights.hf.folder import TEMPORARY

CONFIG = json.loads(Path("recipes/model/deepseek_v3/config.json").read_text())
LAYER = CONFIG["num_hidden_layers"]
"""The multi-token-prediction layer comes after the last layer."""
CARRIED = {
    f"model.layers.{LAYER}.eh_proj.weight": torch.arange(8.0),
    f"model.layers.{LAYER}.enorm.weight": torch.arange(4.0),
    f"model.layers.{LAYER}.hnorm.weight": torch.arange(6.0),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    names = list(CARRIED)
    kept = {"model.norm.weight": torch.zeros(3), names[0]: CARRIED[names[0]]}
    save_file(kept, folder / "model-1.safetensors")
    rest = {name: CARRIED[name] for name in names[1:]}
    rest[f"model.layers.{LAYER + 1}.enorm.weight"] = torch.zeros(1)
    save_file(rest, folder / "model-2.safetensors")
    return folder


def test_carried_tensors_are_those_of_prediction_layers(source: Path) -> None:
    files = {name: path.name for name, path in list_carried_tensors(source, CONFIG).items()}
    first, *rest = CARRIED
    assert files == {first: "model-1.safetensors"} | dict.fromkeys(rest, "model-2.safetensors")


def test_a_model_without_prediction_layers_carries_nothing(source: Path) -> None:
    assert list_carried_tensors(source, {**CONFIG, "num_nextn_predict_layers": 0}) == {}


def test_a_directory_without_weights_carries_nothing(tmp_path: Path) -> None:
    assert list_carried_tensors(tmp_path, CONFIG) == {}


@pytest.mark.parametrize(("max_file_bytes", "num_files"), [(1000, 1), (60, 2), (1, 3)])
def test_files_are_bounded_and_hold_the_same_tensors(
    source: Path, tmp_path: Path, max_file_bytes: int, num_files: int
) -> None:
    written = write_carried(source, tmp_path, CONFIG, max_file_bytes)
    assert len(written) == num_files
    copied: dict[str, torch.Tensor] = {}
    for file in written:
        tensors = load_file(tmp_path / (file.filename + TEMPORARY))
        assert set(file.names) == tensors.keys()
        assert file.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
        assert file.num_bytes <= max_file_bytes or len(file.names) == 1
        copied |= tensors
    assert copied.keys() == CARRIED.keys()
    assert all(torch.equal(copied[name], tensor) for name, tensor in CARRIED.items())
