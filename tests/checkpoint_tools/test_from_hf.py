"""A HuggingFace directory becomes a Megatron checkpoint that to-hf turns back into the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from checkpoint_tools.from_hf import from_hf
from checkpoint_tools.to_hf import to_hf
from checkpoint_tools.torch_dist import open_torch_dist, read_common
from tests.checkpoint_tools.conftest import write_source
from tests.support.small_hf import LARGE, ONE_WORKER, assert_equal, read_all, write_small_model


@pytest.mark.parametrize("max_file_bytes", [1, 5000, LARGE])
def test_files_hold_as_much_as_they_may_and_the_model_comes_back(
    tmp_path: Path, max_file_bytes: int
) -> None:
    source = write_small_model(tmp_path / "hf")
    step = tmp_path / "step"
    report = from_hf(source, step, None, None, max_file_bytes, ONE_WORKER)
    assert report.num_tensors == len(open_torch_dist(step).tensors)
    files = sorted(step.glob("*.distcp"))
    if max_file_bytes == LARGE:
        assert [path.name for path in files] == ["__0_0.distcp"]
    else:
        assert len(files) > 2
    if max_file_bytes == 5000:
        assert max(path.stat().st_size for path in files) <= 5000
    assert read_common(step) == {"step": 0, "extra": {}, "layout": {}}
    to_hf(step, source, tmp_path / "back", None, None, LARGE, ONE_WORKER)
    assert_equal(tmp_path / "back", source)


def test_the_dtype_can_be_chosen(tmp_path: Path) -> None:
    source = write_small_model(tmp_path / "hf")
    from_hf(source, tmp_path / "step", "float32", None, LARGE, ONE_WORKER)
    tensors = open_torch_dist(tmp_path / "step").tensors
    assert {tensor.dtype for tensor in tensors.values()} == {"float32"}


def test_a_result_is_never_written_over(tmp_path: Path) -> None:
    source = write_small_model(tmp_path / "hf")
    with pytest.raises(ValueError, match="hf exists: choose another output"):
        from_hf(source, source, None, None, LARGE, ONE_WORKER)


def test_tensors_of_mixed_precision_come_out_in_one(tmp_path: Path, command: Any) -> None:
    """Norms in float32 in a model of bfloat16, as some publish them."""
    source = write_source("qwen2", tmp_path / "hf")
    weights = load_file(source / "model.safetensors")
    mixed = {name: t if "norm" in name else t.to(torch.bfloat16) for name, t in weights.items()}
    save_file(mixed, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(config))
    assert command("from-hf", source, tmp_path / "megatron") == 0
    assert command("to-hf", tmp_path / "megatron", tmp_path / "out", "--source-hf", source) == 0
    after = read_all(tmp_path / "out")
    assert all(
        torch.equal(after[name], tensor.to(torch.bfloat16)) for name, tensor in mixed.items()
    )
    with safe_open(tmp_path / "out/model-00001-of-00001.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
