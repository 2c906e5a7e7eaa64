"""Models in block FP8 and MXFP4 come out bit for bit as torch and transformers compute them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from checkpoint_tools.cli import main
from checkpoint_tools.options import Effort
from checkpoint_tools.rewrite import dequantize
from mcore_rl.run.serving import find_model
from mcore_rl.weights.hf.checksums import MANIFEST
from mcore_rl.weights.hf.config import ModelFacts, read_hf_config
from mcore_rl.weights.hf.opened import open_hf_dir
from tests.checkpoint_tools.conftest import write_source
from tests.support.quantized_models import FOUR_MIB, FP8, MXFP4, random_bytes, random_mxfp4, write
from tests.support.small_hf import LARGE, read_all
from tests.support.tiny_models import write_model


def assert_same_bits(found: Tensor, expected: Tensor, name: str) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
    assert torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8)), name


def dequantized(values: Tensor, scales: Tensor, block: list[int], dtype: torch.dtype) -> Tensor:
    """Value * scale of its block, for the whole matrix at once."""
    factors = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return (values.float() * factors[: values.shape[0], : values.shape[1]]).to(dtype)


@pytest.mark.parametrize(
    ("block", "scale_dtype", "dtype", "workers"),
    [
        ([128, 128], torch.float32, "bfloat16", 1),
        ([128, 128], torch.bfloat16, "float32", 2),
        ([64, 48], torch.float32, "float16", 2),
    ],
)
def test_fp8_values_times_scales(
    tmp_path: Path, block: list[int], scale_dtype: torch.dtype, dtype: str, workers: int
) -> None:
    tensors = {"bias": torch.randn(8), "norm.weight": torch.randn(9).to(torch.bfloat16)}
    for shape in ((700, 1000), (1, 1), (128, 256), (129, 300000 // 129)):
        blocks = [-(-size // step) for size, step in zip(shape, block, strict=True)]
        values = random_bytes(*shape).view(torch.float8_e4m3fn)
        tensors[f"{shape}.weight"] = values
        tensors[f"{shape}.weight_scale_inv"] = (torch.rand(blocks) * 1e-3).to(scale_dtype)
    source = write(tmp_path / "fp8", tensors, FP8 | {"weight_block_size": block})
    out, to = tmp_path / "out", getattr(torch, dtype)
    dequantize(source, out, dtype, LARGE, Effort((4 << 20) * workers, workers))
    found = read_all(out)
    assert found.keys() == {name for name in tensors if not name.endswith("_scale_inv")}
    for name, tensor in tensors.items():
        if name + "_scale_inv" in tensors:
            expected = dequantized(tensor, tensors[name + "_scale_inv"], block, to)
            finite = ~expected.isnan()
            assert 0.98 < finite.float().mean() <= 1
            assert torch.equal(found[name].isnan(), ~finite), name
            assert_same_bits(found[name][finite], expected[finite], name)
    assert_same_bits(found["bias"], tensors["bias"], "bias")
    assert_same_bits(found["norm.weight"], tensors["norm.weight"].to(to), "norm.weight")
    config = json.loads((out / "config.json").read_text())
    dtypes = {"dtype": dtype, "torch_dtype": dtype}
    assert config == {"architectures": ["SomebodysForCausalLM"], **dtypes}
    assert (out / "tokenizer.json").is_file() and (out / MANIFEST).is_file()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("workers", [1, 2])
def test_mxfp4_blocks_as_transformers_converts_them(
    tmp_path: Path, dtype: str, workers: int
) -> None:
    first, second = (
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.down_proj",
    )
    packed = random_mxfp4(first, 2, 1000, 10) | random_mxfp4(second, 3, 64, 1)
    biases = {f"{first}_bias": torch.randn(2, 1000).to(torch.bfloat16)}
    source, out = write(tmp_path / "mxfp4", packed | biases, MXFP4), tmp_path / "out"
    dequantize(source, out, dtype, LARGE, Effort((4 << 20) * workers, workers))
    found, to = read_all(out), getattr(torch, dtype)
    assert found.keys() == {first, second, *biases}
    assert found[first].shape == (2, 320, 1000)
    for name in (first, second):
        halves = packed[f"{name}_blocks"], packed[f"{name}_scales"]
        assert_same_bits(found[name], convert_moe_packed_tensors(*halves, dtype=to), name)
    assert main(["verify", str(out), "--workers", "1"]) == 0


def test_a_model_of_gpt_oss_computes_what_it_did(tmp_path: Path) -> None:
    """transformers converts the quantized directory by itself, where there is no kernel for it."""
    model = write_model("gpt_oss", tmp_path / "hf")
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in read_all(model).items()}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        tensors |= random_mxfp4(name, experts, rows, columns // 32)
        tensors[f"{name}_scales"] = 120 + tensors[f"{name}_scales"] % 4
    settings = json.loads((model / "config.json").read_text()) | {"dtype": "bfloat16"}
    source, out = write(tmp_path / "mxfp4", tensors, MXFP4, **settings), tmp_path / "out"
    with pytest.raises(ValueError, match=r"quant_method='mxfp4'.*: mcore-rl-ckpt dequanti[sz]e"):
        read_hf_config(source)
    assert main(["dequantize", str(source), str(out), "--workers", "1"]) == 0
    assert open_hf_dir(ModelFacts.read(out)).keys() == read_all(out).keys()
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        before, after = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)(tokens).logits
            for path in (source, out)
        )
    assert after.std() > 0.01
    assert torch.equal(before, after)


def test_a_quantized_model_of_a_known_family_comes_back(tmp_path: Path, capsys: Any) -> None:
    """Into FP8 and out of it; Megatron's format needs plain weights, and may go back beside FP8."""
    source, fp8, out = (
        write_source("deepseek_v3", tmp_path / "hf"),
        tmp_path / "fp8",
        tmp_path / "out",
    )
    (source / "tokenizer_config.json").write_text("{}")
    assert main(["to-fp8", str(source), str(fp8), "--workers", "1"]) == 0
    assert find_model(fp8, None, lambda *_: None) == fp8
    for command in (["from-hf", str(fp8)], ["to-fp8", str(fp8)]):
        assert main([*command, str(tmp_path / "no")]) == 2
        assert "write its weights in bfloat16 first" in capsys.readouterr().err
    assert main(["dequantize", str(fp8), str(out), "--workers", "1", *FOUR_MIB]) == 0
    read_hf_config(out)
    packed, found = read_all(fp8), read_all(out)
    names = [name for name in found if f"{name}_scale_inv" in packed]
    assert len(names) > 50
    for name, tensor in found.items():
        expected = packed[name]
        if name in names:
            expected = dequantized(
                expected, packed[f"{name}_scale_inv"], [128, 128], torch.bfloat16
            )
        assert_same_bits(tensor, expected, name)
    megatron, back = str(tmp_path / "megatron"), tmp_path / "back"
    assert main(["from-hf", str(out), megatron, "--workers", "1"]) == 0
    assert main(["to-hf", megatron, str(back), "--source-hf", str(fp8), "--workers", "1"]) == 0
    returned = read_all(back)
    assert returned.keys() == found.keys()
    for name, tensor in found.items():
        assert_same_bits(returned[name], tensor.to(returned[name].dtype), name)
    assert "quantization_config" not in (back / "config.json").read_text()
    assert main(["dequantize", str(out), str(tmp_path / "no")]) == 2
    assert "has no quantization_config: the model is not quantized" in capsys.readouterr().err
