"""Kimi-K2.5 in INT4 goes to Megatron and comes back: in bfloat16, or in INT4 byte for byte."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint_tools.torch_dist import open_torch_dist
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.opened import open_hf_dir
from mcore_rl.weights.layouts.sglang_models import SGLangSizes, refuse_unserved
from tests.support.quantized_models import FOUR_MIB, INT4
from tests.support.small_hf import read_all, write_hf
from tests.support.tiny_kimi_k25 import LANGUAGE, unpack_all, write_int4_kimi_k25_model

EXPERT = LANGUAGE + "model.layers.2.mlp.experts.5.down_proj.weight"


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def change(source: Path, folder: Path, edit: Any) -> Path:
    """Copy a directory of one file, with its tensors changed by `edit`."""
    folder.mkdir()
    weights = load_file(next(source.glob("*.safetensors")))
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


def test_files_come_back_byte_for_byte(tmp_path: Path, command: Any) -> None:
    source = write_int4_kimi_k25_model(tmp_path / "int4")
    published = read_all(source)
    assert sum(name.endswith("weight_packed") for name in published) == 3 * 8 * 3
    step, back, plain = (tmp_path / name for name in ("step", "back", "plain"))
    assert command("from-hf", source, step, *FOUR_MIB) == 0
    dtypes = {tensor.dtype for tensor in open_torch_dist(step).tensors.values()}
    assert dtypes == {"bfloat16", "float32"}
    assert command("verify", step, source) == 0
    assert command("to-hf", step, back, "--source-hf", source, "--int4") == 0
    assert_same(read_all(back), published)
    settings = [json.loads((folder / "config.json").read_text()) for folder in (back, source)]
    assert settings[0]["text_config"]["quantization_config"] == INT4
    assert settings[0] == settings[1]
    assert command("to-hf", step, plain, "--source-hf", source) == 0
    assert_same(read_all(plain), unpack_all(published))
    assert "quantization_config" not in (plain / "config.json").read_text()
    for other in (source, back, step):
        assert command("verify", plain, other) == 0
    assert command("verify", source, back) == 0
    assert open_hf_dir(ModelFacts.read(plain)).keys() < open_hf_dir(ModelFacts.read(back)).keys()


def test_only_groups_that_were_trained_change(tmp_path: Path, command: Any, capsys: Any) -> None:
    source = write_int4_kimi_k25_model(tmp_path / "int4")
    plain, trained, step, out = (tmp_path / name for name in ("plain", "trained", "step", "out"))
    assert command("dequantize", source, plain) == 0

    def train(weights: dict[str, Tensor]) -> None:
        weights[EXPERT][3, 40] += 0.5
        weights[LANGUAGE + "model.norm.weight"] += 1

    change(plain, trained, train)
    assert command("from-hf", trained, step) == 0
    assert command("to-hf", step, out, "--source-hf", source, "--int4") == 0
    before, after = read_all(source), read_all(out)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    names = {LANGUAGE + "model.norm.weight", f"{EXPERT}_packed", f"{EXPERT}_scale"}
    assert changed == names
    where = (before[f"{EXPERT}_scale"] != after[f"{EXPERT}_scale"]).nonzero().tolist()
    assert where == [[3, 1]]
    words = (before[f"{EXPERT}_packed"] != after[f"{EXPERT}_packed"]).nonzero()
    assert set(words[:, 0].tolist()) == {3} and set(words[:, 1].tolist()) <= {4, 5, 6, 7}
    capsys.readouterr()
    assert command("verify", out, source) == 1
    assert command("verify", step, source) == 1
    printed = capsys.readouterr().out
    assert f"{EXPERT}: 1 of 4096 elements differ, the first at [3, 40]" in printed


def test_plain_weights_of_any_architecture_and_fp8(tmp_path: Path, command: Any) -> None:
    source = write_int4_kimi_k25_model(tmp_path / "int4")
    published = read_all(source)
    plain, fp8, two_steps = (tmp_path / name for name in ("plain", "fp8", "two_steps"))
    assert command("dequantize", source, plain, *FOUR_MIB) == 0
    assert_same(read_all(plain), unpack_all(published))
    unknown = json.loads((source / "config.json").read_text())
    unknown["architectures"] = ["SomebodysForCausalLM"]
    other = write_hf(tmp_path / "other", published, **unknown)
    assert command("dequantize", other, tmp_path / "plain_other", "--dtype", "float32") == 0
    found = read_all(tmp_path / "plain_other")
    assert found[EXPERT].dtype == torch.float32
    assert torch.equal(found[EXPERT], unpack_all(published)[EXPERT].float())
    assert command("to-fp8", source, fp8) == 0
    assert command("to-fp8", plain, two_steps) == 0
    assert_same(
        {k: v.view(torch.uint8) for k, v in read_all(fp8).items()},
        {k: v.view(torch.uint8) for k, v in read_all(two_steps).items()},
    )


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (f"{EXPERT}_scale", None, "needs .*down_proj.weight_scale', which is missing"),
        (f"{EXPERT}_shape", None, "needs .*down_proj.weight_shape', which is missing"),
        (f"{EXPERT}_packed", None, r"weight_\w+' has no place in the model"),
        (EXPERT, torch.zeros(64, 64, dtype=torch.bfloat16), "is stored twice, also as INT4"),
        (f"{EXPERT}_scale", torch.zeros(64, 3, dtype=torch.bfloat16), "a scale for each"),
        (f"{EXPERT}_scale", torch.zeros(64, 2, dtype=torch.int8), "scales should be bfloat16 or"),
        (f"{EXPERT}_packed", torch.zeros(64, 8), "should be a matrix of int32"),
        (f"{EXPERT}_packed", torch.zeros(64, 6, dtype=torch.int32), "whole groups of 32"),
        (f"{EXPERT}_packed", torch.zeros(32, 8, dtype=torch.int32), "a scale for each"),
        (f"{EXPERT}_shape", torch.zeros(3, dtype=torch.int32), "rows and columns"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    tmp_path: Path, command: Any, capsys: Any, name: str, tensor: Tensor | None, message: str
) -> None:
    def edit(weights: dict[str, Tensor]) -> None:
        weights.pop(name, None)
        if tensor is not None:
            weights[name] = tensor

    wrong = change(write_int4_kimi_k25_model(tmp_path / "int4"), tmp_path / "wrong", edit)
    capsys.readouterr()
    assert command("from-hf", wrong, tmp_path / "step") == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    with pytest.raises(ValueError, match=r"down_proj\.weight"):
        open_hf_dir(ModelFacts.read(wrong))


def test_int4_needs_a_source_in_int4(tmp_path: Path, command: Any, capsys: Any) -> None:
    source = write_int4_kimi_k25_model(tmp_path / "int4")
    plain, step = tmp_path / "plain", tmp_path / "step"
    assert command("dequantize", source, plain) == 0
    assert command("from-hf", source, step) == 0
    out = tmp_path / "out"
    assert command("to-hf", step, out, "--source-hf", plain, "--int4") == 2
    assert "has no INT4 weights, which --int4 writes" in capsys.readouterr().err
    dtype = ["--dtype", "float32"]
    assert command("to-hf", step, out, "--source-hf", source, "--int4", *dtype) == 2
    assert "scales of" in capsys.readouterr().err
    assert not out.exists()


def test_another_kind_of_compressed_tensors_is_refused(
    tmp_path: Path, command: Any, capsys: Any
) -> None:
    source = write_int4_kimi_k25_model(tmp_path / "int4")
    path = source / "config.json"
    path.write_text(path.read_text().replace('"group_size": 32', '"group_size": 64'))
    assert command("from-hf", source, tmp_path / "step") == 2
    error = capsys.readouterr().err
    assert "quant_method='compressed-tensors'" in error
    assert "INT4 as Kimi-K2.5 has it, not group_size=64 of weights" in error


def test_the_language_model_alone_is_a_deepseek_v3(
    tmp_path: Path, command: Any, capsys: Any
) -> None:
    source, text = write_int4_kimi_k25_model(tmp_path / "int4"), tmp_path / "text"
    (source / "tokenizer_config.json").write_text("{}")
    assert command("text-only", source, text) == 0
    published = read_all(source)
    assert_same(
        read_all(text),
        {
            name.removeprefix(LANGUAGE): tensor
            for name, tensor in published.items()
            if name.startswith(LANGUAGE)
        },
    )
    facts = ModelFacts.read(text)
    assert facts.architecture == "DeepseekV3ForCausalLM" and facts.packing == "int4"
    assert facts.config["model_type"] == "deepseek_v3" and facts.config["dtype"] == "bfloat16"
    assert (text / "tokenizer_config.json").is_file()
    open_hf_dir(facts)
    step, back = tmp_path / "step", tmp_path / "back"
    assert command("from-hf", text, step) == 0
    assert command("to-hf", step, back, "--source-hf", text, "--int4") == 0
    assert_same(read_all(back), read_all(text))
    capsys.readouterr()
    assert command("text-only", text, tmp_path / "no") == 2
    assert "this is DeepseekV3ForCausalLM" in capsys.readouterr().err
    for folder in (source, text):
        refuse_unserved(ModelFacts.read(folder).config, SGLangSizes())
