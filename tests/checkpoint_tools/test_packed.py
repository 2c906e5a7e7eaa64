"""Values and scales of both quantizations are paired, with the shape of what they encode."""

from typing import Any

import pytest

from checkpoint_tools.packed import collect_stored_names, find_packed
from checkpoint_tools.stored import DTYPE_BYTES, Chunk, StoredTensor

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 64]}
MXFP4 = {"quant_method": "mxfp4"}


def stored(*tensors: tuple[str, str, tuple[int, ...]]) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for name, dtype, shape in tensors:
        num_bytes = DTYPE_BYTES[dtype]
        for size in shape:
            num_bytes *= size
        chunk = Chunk(name, dtype, (0,) * len(shape), shape, "/dir/file", 0, num_bytes, False)
        found[name] = StoredTensor(name, dtype, shape, (chunk,))
    return found


def test_blocks_of_8_bit_values() -> None:
    tensors = stored(
        ("a.weight", "float8_e4m3fn", (200, 300)),
        ("a.weight_scale_inv", "float32", (2, 5)),
        ("norm.weight", "bfloat16", (4,)),
    )
    packed = find_packed({"quantization_config": FP8}, tensors, "bfloat16", "config.json")
    assert packed.keys() == {"a.weight"}
    matrix = packed["a.weight"]
    assert (matrix.format, matrix.block, matrix.shape) == ("fp8", (128, 64), (200, 300))
    assert matrix.num_bytes == 200 * 300 * 2
    assert matrix.held_bytes == 2 * 5 * 4
    assert collect_stored_names(packed) == {"a.weight", "a.weight_scale_inv"}


def test_groups_of_4_bit_values_of_experts_are_transposed() -> None:
    tensors = stored(("e_blocks", "uint8", (2, 3, 4, 16)), ("e_scales", "uint8", (2, 3, 4)))
    packed = find_packed({"quantization_config": MXFP4}, tensors, "float32", "config.json")
    experts = packed["e"]
    assert (experts.format, experts.shape) == ("mxfp4", (2, 4 * 32, 3))
    assert experts.num_bytes == 2 * 128 * 3 * 4
    assert experts.held_bytes == 3 * 4 * (16 + 1)
    assert collect_stored_names(packed) == tensors.keys()


def test_places_change_with_anything_that_changes_the_elements() -> None:
    tensors = stored(
        ("a.weight", "float8_e4m3fn", (2, 2)), ("a.weight_scale_inv", "float32", (1, 1))
    )
    narrow = FP8 | {"weight_block_size": [2, 2]}
    places = [
        find_packed({"quantization_config": settings}, tensors, "bfloat16", "c")[
            "a.weight"
        ].places()
        for settings in (FP8, FP8, narrow)
    ]
    assert places[0] == places[1] != places[2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (None, r"^c: quant_method=None .* only 'fp8' and 'mxfp4' can be dequantized"),
        (FP8 | {"weight_block_size": [128, True]}, r"^c: weight_block_size=\[128, True\]"),
        (FP8 | {"weight_block_size": [128, 0]}, r"^c: weight_block_size=\[128, 0\]"),
        (MXFP4, r"^/dir/file: tensor 'a' is float8_e5m2, and no tensor has its scales"),
    ],
)
def test_what_is_not_supported_is_named(settings: Any, message: str) -> None:
    tensors = stored(("a", "float8_e5m2", (2, 2)))
    with pytest.raises(ValueError, match=message):
        find_packed({"quantization_config": settings}, tensors, "bfloat16", "c")
