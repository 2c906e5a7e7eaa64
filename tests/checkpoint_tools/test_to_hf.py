"""A Megatron checkpoint becomes a HuggingFace directory; what Megatron lacks is carried over."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_tools.from_hf import from_hf
from checkpoint_tools.to_hf import has_weights, to_hf
from mcore_rl.weights.hf.folder import INDEX
from tests.checkpoint_tools.conftest import MTP
from tests.support.small_hf import LARGE, ONE_WORKER, assert_equal, read_all, write_small_model


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_small_model(tmp_path / "hf")


@pytest.fixture
def step(source: Path, tmp_path: Path) -> Path:
    from_hf(source, tmp_path / "step", None, None, LARGE, ONE_WORKER)
    return tmp_path / "step"


def test_weights_are_cast_and_config_json_says_so(source: Path, step: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (report,) = to_hf(step, source, out, "float32", None, LARGE, ONE_WORKER)
    weights = read_all(source)
    assert (report.out, report.num_tensors) == (out, len(weights))
    for name, tensor in read_all(out).items():
        assert torch.equal(tensor, weights[name].float()), name
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    assert (out / "tokenizer.json").is_file()


def test_only_config_json_of_the_source_is_needed(source: Path, step: Path, tmp_path: Path) -> None:
    assert has_weights(source)
    config_only = tmp_path / "config_only"
    config_only.mkdir()
    (config_only / "config.json").write_text((source / "config.json").read_text())
    assert not has_weights(config_only)
    to_hf(step, config_only, tmp_path / "out", None, None, LARGE, ONE_WORKER)
    assert_equal(tmp_path / "out", source)


def test_neither_result_is_written_over(source: Path, step: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    for out, optimizer in ((taken, None), (tmp_path / "out", taken)):
        with pytest.raises(ValueError, match="taken exists: choose another output"):
            to_hf(step, source, out, None, optimizer, LARGE, ONE_WORKER)
    assert not (tmp_path / "out").exists()


@pytest.mark.gloo
def test_what_megatron_does_not_train_is_carried_unchanged(
    saved: Path, tmp_path: Path, command: Any
) -> None:
    source = saved / "deepseek_v3/hf"
    out = tmp_path / "out"
    arguments = ("--source-hf", source, "--dtype", "bfloat16", "--memory-budget", "5MiB")
    assert command("to-hf", saved / "deepseek_v3/step", out, *arguments) == 0
    before, after = read_all(source), read_all(out)
    for name in MTP:
        assert torch.equal(before[name], after[name])
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(before[bias], after[bias]) and after[bias].dtype == torch.float32
    cast = {name: t.to(torch.bfloat16) for name, t in before.items() if not name.endswith("_bias")}
    assert all(torch.equal(after[name], tensor) for name, tensor in cast.items())
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.gloo
def test_a_critic_is_merged_with_its_value_head(saved: Path, tmp_path: Path, command: Any) -> None:
    source = saved / "qwen3_moe/hf"
    assert command("to-hf", saved / "critic/step", tmp_path / "out", "--source-hf", source) == 0
    assert_equal(tmp_path / "out", saved / "critic/exported")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForSequenceClassification"]
    assert "score.weight" in json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
