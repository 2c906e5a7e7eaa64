"""INT4 weights are packed, quantized and dequantized bit for bit as compressed-tensors does it."""

from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import (
    PackedQuantizationCompressor,
    pack_to_int32,
    unpack_from_int32,
)
from torch import Tensor

from mcore_rl.weights.hf.int4 import GROUP, find_int4_problem, is_int4
from mcore_rl.weights.hf.int4_groups import (
    dequantize_groups,
    pack_values,
    quantize_changed,
    quantize_groups,
    unpack_values,
)
from tests.support.int4_oracle import SCHEME, compress_with_library
from tests.support.quantized_models import INT4


def make_weights(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Weights of very different sizes, a group of zeros and one whose largest is negative."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(rows, columns, generator=generator)
    weights *= 10.0 ** torch.randint(-6, 3, (rows, 1), generator=generator)
    weights[0, :GROUP] = 0
    weights[1, :GROUP] = -weights[1, :GROUP].abs()
    return weights.to(torch.bfloat16)


def test_every_pair_of_values_is_packed_as_the_library_does() -> None:
    pairs = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8)).to(torch.int8)
    values = pairs.view(8, 64)
    packed = pack_values(values)
    assert packed.dtype == torch.int32
    assert torch.equal(packed, pack_to_int32(values, 4))
    assert torch.equal(unpack_values(packed), values.to(torch.bfloat16))
    assert torch.equal(unpack_from_int32(packed, 4, values.shape), values)


def test_the_first_value_is_in_the_lowest_bits() -> None:
    values = torch.tensor([[-8, -7, 0, 0, 0, 0, 0, 7]])
    assert pack_values(values).tolist() == [[0xF888_8810 - (1 << 32)]]


@pytest.mark.parametrize("seed", range(4))
def test_weights_are_quantized_and_read_as_the_library_does(seed: int) -> None:
    weights = make_weights(48, 8 * GROUP, seed)
    packed, scales = quantize_groups(weights)
    wanted = compress_with_library(weights)
    assert scales.dtype == torch.bfloat16
    assert torch.equal(scales.view(torch.int16), wanted["weight_scale"].view(torch.int16))
    assert torch.equal(packed, wanted["weight_packed"])
    state = {"weight_packed": packed, "weight_scale": scales}
    shape = {"weight_shape": torch.tensor(weights.shape)}
    plain = PackedQuantizationCompressor.decompress(state | shape, SCHEME)["weight"]
    assert torch.equal(dequantize_groups(packed, scales).view(torch.int16), plain.view(torch.int16))


def test_a_slice_is_read_without_the_rest() -> None:
    packed, scales = quantize_groups(make_weights(16, 6 * GROUP))
    whole = dequantize_groups(packed, scales)
    rows, groups = slice(3, 11), slice(2, 5)
    words, columns = (slice(groups.start * n, groups.stop * n) for n in (4, GROUP))
    assert torch.equal(
        dequantize_groups(packed[rows, words], scales[rows, groups]), whole[rows, columns]
    )


def test_groups_that_did_not_change_keep_their_bytes() -> None:
    """Published scales are not those that the formula gives for the weights."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-8, 8, (64, 4 * GROUP), generator=generator, dtype=torch.int8)
    packed = pack_values(values)
    scales = (torch.rand(64, 4, generator=generator) * 0.01).to(torch.bfloat16)
    weights = dequantize_groups(packed, scales)
    assert not torch.equal(quantize_groups(weights)[1], scales)
    for same in (weights, weights.float()):
        kept = quantize_changed(same, packed, scales)
        assert torch.equal(kept[0], packed) and torch.equal(kept[1], scales)
    changed = weights.clone()
    changed[5, 40] += 0.25
    fresh_packed, fresh_scales = quantize_groups(changed)
    found_packed, found_scales = quantize_changed(changed, packed, scales)
    is_changed = torch.zeros(64, 4, dtype=torch.bool)
    is_changed[5, 1] = True
    assert torch.equal(found_scales, torch.where(is_changed, fresh_scales, scales))
    assert torch.equal(found_packed[5, 4:8], fresh_packed[5, 4:8])
    found_packed[5, 4:8] = packed[5, 4:8]
    assert torch.equal(found_packed, packed)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(bad: float) -> None:
    weights = make_weights(2, 2 * GROUP)
    weights[1, 40] = bad
    plain = dequantize_groups(*quantize_groups(weights))
    assert not plain[1, GROUP:].isfinite().any()
    assert plain[0].isfinite().all() and plain[1, :GROUP].isfinite().all()


def change_weights(**change: Any) -> dict[str, Any]:
    group = INT4["config_groups"]["group_0"]
    return INT4 | {"config_groups": {"group_0": group | {"weights": group["weights"] | change}}}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (INT4, ""),
        (None, None),
        ({"quant_method": "fp8"}, None),
        (
            INT4 | {"format": "nvfp4-pack-quantized"},
            "format='nvfp4-pack-quantized' with 1 config_g",
        ),
        (INT4 | {"config_groups": {}}, "format='pack-quantized' with 0 config_groups"),
        (change_weights(num_bits=8), "num_bits=8 of weights"),
        (change_weights(group_size=128), "group_size=128 of weights"),
        (change_weights(symmetric=False), "symmetric=False of weights"),
        (change_weights(actorder="group"), "actorder='group' of weights"),
    ],
)
def test_other_formats_are_told_apart(settings: Any, problem: str | None) -> None:
    for config in (
        {"quantization_config": settings},
        {"text_config": {"quantization_config": settings}},
    ):
        found = find_int4_problem(config)
        assert found is None if problem is None else found is not None and found.startswith(problem)
        assert is_int4(config) == (problem == "")
