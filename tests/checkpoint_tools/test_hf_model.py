"""config.json and the tensors of a directory must agree; what does not is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoint_tools.hf_model import check_against_config, find_dtype, read_config
from checkpoint_tools.safetensors_file import read_header
from checkpoint_tools.stored import Chunk, StoredTensor
from tests.support.megatron_layout import model_config
from tests.support.small_hf import write_hf, write_small_model


def stored(name: str, dtype: str, *shape: int) -> StoredTensor:
    chunk = Chunk(name, dtype, (0,) * len(shape), shape, "/dir/file", 0, 0, False)
    return StoredTensor(name, dtype, shape, (chunk,))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_tensors_that_fit_give_the_architecture(tmp_path: Path) -> None:
    folder = write_small_model(tmp_path / "hf")
    tensors = read_header(folder / "model.safetensors")
    assert check_against_config(folder, tensors) == "Qwen3MoeForCausalLM"
    norm = stored("model.norm.weight", "float32", 8)
    assert check_against_config(folder, {**tensors, norm.key: norm}) == "Qwen3MoeForCausalLM"


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("model.norm.weight", None, "lacks 1 of .* tensors .* first is 'model.norm.weight'"),
        ("more", stored("more", "bfloat16", 2), "tensor 'more' has no place in the model"),
        (
            "model.norm.weight",
            stored("model.norm.weight", "bfloat16", 9),
            r"has shape \(9,\), by config.json it should be \(8,\)",
        ),
        (
            "model.norm.weight",
            stored("model.norm.weight", "float16", 8),
            "has dtype float16, by config.json it should be bfloat16",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    tmp_path: Path, name: str, changed: StoredTensor | None, message: str
) -> None:
    folder = write_small_model(tmp_path / "hf")
    tensors = read_header(folder / "model.safetensors")
    given = {**tensors, name: changed}
    with pytest.raises(ValueError, match=message):
        check_against_config(folder, {k: t for k, t in given.items() if t is not None})


def test_models_without_a_known_config_are_not_compared(tmp_path: Path) -> None:
    tensors = {"a": stored("a", "float32", 2)}
    assert check_against_config(tmp_path, tensors).startswith("no config.json: ")
    folder = write_hf(tmp_path / "hf", {}, architectures=["SomebodysForCausalLM"])
    assert check_against_config(folder, tensors).startswith("SomebodysForCausalLM is unknown here")


def test_a_setting_of_the_wrong_type_is_named_with_its_file(tmp_path: Path) -> None:
    folder = write_small_model(tmp_path / "hf")
    assert read_config(folder)["hidden_size"] == 8
    edit_config(folder, num_experts="four")
    with pytest.raises(ValueError, match=r"hf/config\.json: "):
        read_config(folder)


def test_the_dtype_is_that_of_config_json_or_of_most_tensors() -> None:
    tensors = {
        "a": stored("a", "float16", 1),
        "b": stored("b", "float16", 1),
        "c": stored("c", "float32", 1),
    }
    assert find_dtype(model_config(dtype="bfloat16"), tensors) == "bfloat16"
    assert find_dtype(model_config(), tensors) == "float16"
    with pytest.raises(ValueError, match=r"dtype='float3' in config\.json is not among float64"):
        find_dtype(model_config(dtype="float3"), tensors)
