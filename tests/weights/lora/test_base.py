"""The checksum of a base tells models apart, and not the ways to divide one among files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_rl.weights.lora.base import compute_base_sum, compute_random_sum
from tests.support.tiny_models import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen3_moe", tmp_path_factory.mktemp("base") / "model")


def test_files_do_not_matter(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    half = len(tensors) // 2
    for number, names in enumerate((list(tensors)[:half], list(tensors)[half:])):
        part = {name: tensors[name] for name in names}
        save_file(part, tmp_path / f"part{number}.safetensors", metadata={"format": "np"})
    assert compute_base_sum(tmp_path) == compute_base_sum(model)


@pytest.mark.parametrize("change", ["one value", "dtype", "name", "shape"])
def test_other_weights_have_another_sum(model: Path, tmp_path: Path, change: str) -> None:
    tensors = load_file(model / "model.safetensors")
    name = next(name for name in tensors if name.endswith("o_proj.weight"))
    value = tensors.pop(name)
    if change == "one value":
        value.view(-1)[value.numel() // 2] += 1
    elif change == "dtype":
        value = value.to(torch.float16)
    elif change == "name":
        name = name.replace("o_proj", "p_proj")
    else:
        value = value.view(-1, 2)
    save_file({**tensors, name: value}, tmp_path / "model.safetensors")
    assert compute_base_sum(tmp_path) != compute_base_sum(model)


def test_a_file_that_was_cut_is_named(model: Path, tmp_path: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"model\.safetensors ends within tensor '.*download it"):
        compute_base_sum(tmp_path)


def test_random_weights_are_those_of_their_seed(model: Path) -> None:
    from mcore_rl.weights.hf.config import read_hf_config

    config = read_hf_config(model)
    wider = {**config, "moe_intermediate_size": 2 * config["moe_intermediate_size"]}
    sums = {compute_random_sum(c, seed) for c in (config, wider) for seed in (0, 1)}
    assert len(sums) == 4
    assert compute_random_sum(config, 1) in sums
