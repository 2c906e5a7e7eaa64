"""Index, files and config.json of a HuggingFace directory must agree; what does not is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from checkpoint_tools.hf import open_hf, read_index

INDEX = "model.safetensors.index.json"


def write_two_files(folder: Path) -> dict[str, Any]:
    save_file({"a": torch.ones(4)}, folder / "1.safetensors")
    save_file({"b": torch.ones(6)}, folder / "2.safetensors")
    weight_map = {"a": "1.safetensors", "b": "2.safetensors"}
    return {"metadata": {"total_size": 40}, "weight_map": weight_map}


def test_a_sharded_directory_is_opened(tmp_path: Path) -> None:
    index = write_two_files(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps(index))
    checkpoint = open_hf(tmp_path)
    assert {name: t.chunks[0].file for name, t in checkpoint.tensors.items()} == index["weight_map"]
    assert checkpoint.facts["config"].startswith("no config.json")
    assert checkpoint.sums is None


def test_a_directory_without_an_index_has_none(tmp_path: Path) -> None:
    write_two_files(tmp_path)
    assert read_index(tmp_path) is None
    assert open_hf(tmp_path).num_bytes == 40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i["weight_map"].update(c="1.safetensors"), "'c' should be in 1.safetensors"),
        (lambda i: i["weight_map"].update(b="1.safetensors"), "'b' should be in 1.safetensors"),
        (lambda i: i["weight_map"].update(b="3.safetensors"), "3.safetensors, named in"),
        (lambda i: i["weight_map"].update(b="../x"), "'../x', which is not a file"),
        (lambda i: i["weight_map"].update(b=7), "7, which is not a file"),
        (lambda i: i["weight_map"].clear(), "weight_map is empty"),
        (lambda i: i["metadata"].update(total_size=41), "total_size is 41, the tensors have 40"),
        (lambda i: i.pop("weight_map"), "is damaged: KeyError"),
    ],
)
def test_a_wrong_index_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    index = write_two_files(tmp_path)
    change(index)
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        open_hf(tmp_path)


def test_a_tensor_stored_twice_is_refused(tmp_path: Path) -> None:
    for name in ("1", "2"):
        save_file({"a": torch.ones(4)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"tensor 'a' is also in 1\.safetensors"):
        open_hf(tmp_path)
