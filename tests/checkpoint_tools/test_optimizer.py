"""Adam's state goes to HuggingFace's names and back without a change; what is missing is named."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_tools.from_hf import from_hf
from checkpoint_tools.hf_model import read_config
from checkpoint_tools.megatron_model import megatron_tensors
from checkpoint_tools.optimizer import PREFIX, STATES, optimizer_from_hf, optimizer_to_hf
from checkpoint_tools.torch_dist import COMMON, open_torch_dist, read_common
from tests.support.small_hf import LARGE, ONE_WORKER, assert_equal, read_all, write_small_model


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_small_model(tmp_path / "hf")


@pytest.fixture
def adam(source: Path, tmp_path: Path) -> Path:
    """Random moments and master weights of the model, under HuggingFace's names."""
    folder = tmp_path / "adam"
    folder.mkdir()
    generator = torch.Generator().manual_seed(3)
    state = {
        f"{kind}.{name}": torch.randn(tensor.shape, generator=generator)
        for kind in STATES
        for name, tensor in read_all(source).items()
    }
    save_file(state, folder / "model.safetensors")
    torch.save({"step": 7, "extra": {}, "optimizer": {"step": 7}}, folder / COMMON)
    return folder


def test_the_state_goes_there_and_back(source: Path, adam: Path, tmp_path: Path) -> None:
    step = tmp_path / "step"
    from_hf(source, step, None, adam, LARGE, ONE_WORKER)
    checkpoint = open_torch_dist(step)
    in_optimizer = [key for key in checkpoint.tensors if key.startswith(PREFIX)]
    assert len(in_optimizer) * 4 == len(checkpoint.tensors) * 3
    assert read_common(step)["optimizer"] == {"step": 7}
    config: Any = read_config(source)
    report = optimizer_to_hf(checkpoint, config, tmp_path / "back", LARGE, ONE_WORKER)
    assert report.num_tensors == len(read_all(adam))
    assert_equal(tmp_path / "back", adam)
    _, _, common = optimizer_from_hf(
        tmp_path / "back", megatron_tensors(config, "bfloat16"), config
    )
    assert common["step"] == 7


def test_each_box_of_megatrons_state_is_assembled_in_float32(source: Path, adam: Path) -> None:
    config: Any = read_config(source)
    wanted = megatron_tensors(config, "bfloat16")
    opened, boxes, common = optimizer_from_hf(adam, wanted, config)
    assert (opened.folder, common["step"]) == (adam, 7)
    assert {tensor.dtype for tensor, _, _ in boxes} == {"float32"}
    keys = {f"{PREFIX}{kind}.{tensor.key}" for kind in STATES for tensor in wanted}
    assert {tensor.key for tensor, _, _ in boxes} == keys == {made.name for _, _, made in boxes}


def test_a_checkpoint_without_adams_state_is_refused(source: Path, tmp_path: Path) -> None:
    from_hf(source, tmp_path / "step", None, None, LARGE, ONE_WORKER)
    config: Any = read_config(source)
    checkpoint = open_torch_dist(tmp_path / "step")
    with pytest.raises(ValueError, match=r"step has optimizer state \[\], only that of Adam"):
        optimizer_to_hf(checkpoint, config, tmp_path / "out", LARGE, ONE_WORKER)


def test_what_a_state_lacks_is_named(source: Path, adam: Path, tmp_path: Path) -> None:
    config: Any = read_config(source)
    wanted = megatron_tensors(config, "bfloat16")
    no_steps = tmp_path / "no_steps"
    shutil.copytree(adam, no_steps)
    torch.save({"step": 7}, no_steps / COMMON)
    with pytest.raises(ValueError, match=r"common\.pt has no state of an optimizer"):
        optimizer_from_hf(no_steps, wanted, config)
    state = load_file(adam / "model.safetensors")
    del state["exp_avg.model.norm.weight"]
    save_file(state, adam / "model.safetensors")
    with pytest.raises(ValueError, match=r"adam lacks 'model\.norm\.weight'"):
        optimizer_from_hf(adam, wanted, config)
