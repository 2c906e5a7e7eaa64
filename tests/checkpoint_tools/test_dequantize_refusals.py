"""Quantized models that cannot be dequantized are refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint_tools.cli import main
from checkpoint_tools.rewrite import dequantize
from tests.support.quantized_models import FOUR_MIB, FP8, MXFP4, random_bytes, random_mxfp4, write
from tests.support.small_hf import LARGE, ONE_WORKER

Tensors = dict[str, Tensor]


def fp8_tensors() -> Tensors:
    return {
        "a.weight": random_bytes(200, 300, most=100).view(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.ones(2, 3),
        "norm.weight": torch.ones(4),
    }


def mxfp4_tensors() -> Tensors:
    return random_mxfp4("e", 2, 3, 4)


@pytest.mark.parametrize(
    ("quantization", "tensors", "change", "message"),
    [
        (
            {"quant_method": "awq"},
            fp8_tensors,
            {},
            "config.json: quant_method='awq' .* only 'fp8' and 'mxfp4'",
        ),
        (
            {"quant_method": "compressed-tensors"},
            fp8_tensors,
            {},
            "quant_method='compressed-tensors'",
        ),
        ("fp8", fp8_tensors, {}, "quant_method=None"),
        (
            FP8 | {"weight_block_size": None},
            fp8_tensors,
            {},
            "weight_block_size=None .* only blocks of",
        ),
        (FP8 | {"fmt": "e5m2"}, fp8_tensors, {}, "fmt='e5m2'"),
        (
            FP8 | {"activation_scheme": "static"},
            fp8_tensors,
            {},
            "activation_scheme='static' .* 'dynamic'",
        ),
        (
            FP8 | {"weight_block_size": [64, 128]},
            fp8_tensors,
            {},
            r"'a.weight_scale_inv' .* should have \(4, 3\)",
        ),
        (
            FP8,
            fp8_tensors,
            {"a.weight": None},
            "'a.weight_scale_inv' belongs to 'a.weight', which .* lacks",
        ),
        (
            FP8,
            fp8_tensors,
            {"a.weight_scale_inv": None},
            "'a.weight' is float8_e4m3fn, and no tensor",
        ),
        (
            FP8,
            fp8_tensors,
            {"a.weight": torch.ones(200, 300)},
            "'a.weight' is float32 .* should be a matrix",
        ),
        (
            FP8,
            fp8_tensors,
            {"a.weight_scale_inv": torch.ones(3, 2)},
            r"has shape \(3, 2\): .* have \(2, 3\)",
        ),
        (
            FP8,
            fp8_tensors,
            {"a.weight_scale_inv": torch.ones(2, 3, dtype=torch.int32)},
            "is int32: scales",
        ),
        (
            FP8,
            fp8_tensors,
            {"b": random_bytes(4)},
            "tensor 'b' is uint8, and no tensor has its scales",
        ),
        (
            FP8,
            dict,
            {"norm.weight": torch.ones(4)},
            "quant_method='fp8', but none of 1 tensors is quantized",
        ),
        (
            MXFP4,
            mxfp4_tensors,
            {"e_blocks": None},
            "'e_scales' belongs to 'e_blocks', which the model lacks",
        ),
        (
            MXFP4,
            mxfp4_tensors,
            {"e_scales": None},
            "'e_blocks' belongs to 'e_scales', which the model lacks",
        ),
        (
            MXFP4,
            mxfp4_tensors,
            {"e_scales": random_bytes(2, 4, 3)},
            r"shape \(2, 4, 3\): .* have \(2, 3, 4\)",
        ),
        (
            MXFP4,
            mxfp4_tensors,
            {"e_scales": torch.ones(2, 3, 4)},
            "'e_scales' is float32: scales should be",
        ),
        (
            MXFP4,
            mxfp4_tensors,
            {"e_blocks": random_bytes(2, 3, 64)},
            "'e_blocks' is uint8 .* groups of 32",
        ),
        (
            MXFP4,
            mxfp4_tensors,
            {"e": torch.ones(2)},
            "tensor 'e' is stored twice, also as .* 'e_blocks'",
        ),
        (MXFP4, fp8_tensors, {}, "'a.weight' is float8_e4m3fn, and no tensor has its scales"),
    ],
)
def test_what_cannot_be_dequantized_is_refused_by_name(
    tmp_path: Path,
    quantization: Any,
    tensors: Callable[[], Tensors],
    change: dict[str, Tensor | None],
    message: str,
) -> None:
    changed = {name: tensor for name, tensor in (tensors() | change).items() if tensor is not None}
    source = write(tmp_path / "source", changed, quantization)
    with pytest.raises(ValueError, match=message):
        dequantize(source, tmp_path / "out", "bfloat16", LARGE, ONE_WORKER)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_expert_that_does_not_fit_is_refused(tmp_path: Path, capsys: Any) -> None:
    source = write(tmp_path / "source", random_mxfp4("e", 1, 1000, 100), MXFP4)
    assert (
        main(["dequantize", str(source), str(tmp_path / "out"), "--workers", "1", *FOUR_MIB]) == 2
    )
    assert "leaves 4096 KiB for each worker" in (error := capsys.readouterr().err)
    assert "each worker, 'e' needs 4980 KiB" in error
