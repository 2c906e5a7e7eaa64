"""A model's matrices become 8-bit values and scales; what has no place in the format is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_tools.rewrite import to_fp8
from mcore_rl.weights.hf.quantize import quantize_into
from tests.checkpoint_tools.conftest import MTP, write_source
from tests.support.small_hf import LARGE, ONE_WORKER, read_all, write_hf, write_small_model

PROJECTION = "model.layers.0.mlp.experts.3.up_proj.weight"


def test_projections_are_quantized_and_the_rest_is_kept(tmp_path: Path) -> None:
    source = write_small_model(tmp_path / "hf")
    out = tmp_path / "out"
    to_fp8(source, out, LARGE, ONE_WORKER)
    before = read_all(source)
    after = read_all(out)
    quantized = {name for name in before if after[name].dtype == torch.float8_e4m3fn}
    assert PROJECTION in quantized
    assert after.keys() == before.keys() | {f"{name}_scale_inv" for name in quantized}
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight"):
        assert torch.equal(after[name], before[name]), name
    scale = after[f"{PROJECTION}_scale_inv"]
    restored = after[PROJECTION].float() * scale
    torch.testing.assert_close(restored, before[PROJECTION].float(), rtol=2**-4, atol=1e-2)
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "fp8"
    assert (out / "tokenizer.json").is_file()


def test_a_matrix_of_another_dtype_is_refused_by_name(tmp_path: Path) -> None:
    weights = read_all(write_small_model(tmp_path / "hf"))
    config = json.loads((tmp_path / "hf/config.json").read_text()) | {"dtype": "float64"}
    weights = {name: tensor.double() for name, tensor in weights.items()}
    source = write_hf(tmp_path / "double", weights, **config)
    with pytest.raises(ValueError, match=r"model\.safetensors: tensor .* is float64 already"):
        to_fp8(source, tmp_path / "out", LARGE, ONE_WORKER)
    assert not (tmp_path / "out").exists()


def test_stacked_experts_are_not_quantized(tmp_path: Path) -> None:
    source = write_source("gpt_oss", tmp_path / "hf")
    with pytest.raises(ValueError, match="experts that are stacked in one tensor"):
        to_fp8(source, tmp_path / "out", LARGE, ONE_WORKER)
    assert not (tmp_path / "out").exists()


def test_eight_bit_values_and_scales_are_those_of_the_trainer(tmp_path: Path, command: Any) -> None:
    source, out = write_source("deepseek_v3", tmp_path / "hf"), tmp_path / "out"
    assert command("to-fp8", source, out, "--memory-budget", "4MiB") == 0
    before, after = read_all(source), read_all(out)
    quantized = [name for name in after if name + "_scale_inv" in after]
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in quantized
    assert MTP[0] not in quantized and MTP[1] in quantized
    for name, tensor in before.items():
        if name not in quantized:
            assert torch.equal(after[name], tensor), name
            continue
        values = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
        scales = torch.empty_like(after[name + "_scale_inv"])
        quantize_into(tensor, values, scales)
        assert torch.equal(after[name].view(torch.uint8), values.view(torch.uint8)), name
        assert torch.equal(after[name + "_scale_inv"], scales), name
    assert (
        json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"]
        == "fp8"
    )
    assert command("verify", out) == 0
