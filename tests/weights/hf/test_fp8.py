"""Names and boxes of block-FP8 weights: which tensors are quantized, and where their scales are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.weights.box import Box
from mcore_rl.weights.hf.fp8 import (
    BLOCK,
    count_blocks,
    find_scaled_name,
    is_converted,
    make_scale_box,
    make_scale_name,
)

MATRIX = "model.layers.0.self_attn.q_proj.weight"


def test_projections_are_quantized_whatever_a_family_calls_them():
    layer = "model.layers.0."
    converted = (
        "self_attn.q_proj",
        "mlp.experts.3.up_proj",
        "block_sparse_moe.experts.3.w1",
        "mlp.shared_expert.down_proj",
        "self_attn.indexer.wq_b",
        "self_attn.indexer.wk",
    )
    kept = ("mlp.gate", "block_sparse_moe.gate", "mlp.shared_expert_gate", "self_attn.q_norm")
    kept = (*kept, "self_attn.indexer.weights_proj", "self_attn.indexer.k_norm")
    assert all(is_converted(f"{layer}{name}.weight") for name in converted)
    assert not any(is_converted(f"{layer}{name}.weight") for name in kept)
    assert not is_converted(layer + "self_attn.q_proj.bias")


@pytest.mark.parametrize(("size", "expected"), [(0, 0), (1, 1), (128, 1), (129, 2), (300, 3)])
def test_the_last_block_may_be_smaller(size: int, expected: int) -> None:
    assert count_blocks(size) == expected


def test_names_of_scales_lead_back_to_the_matrix() -> None:
    assert make_scale_name(MATRIX) == MATRIX + "_scale_inv"
    assert find_scaled_name(make_scale_name(MATRIX)) == MATRIX
    assert find_scaled_name(MATRIX) is None
    assert find_scaled_name("model.layers.0.mlp.bias_scale_inv") is None


@given(st.data())
def test_the_scales_of_a_box_are_those_of_the_blocks_it_touches(data: st.DataObject) -> None:
    start = tuple(BLOCK * data.draw(st.integers(0, 3)) for _ in range(2))
    stop = tuple(first + data.draw(st.integers(1, 3 * BLOCK)) for first in start)
    scales = make_scale_box(Box(MATRIX, start, stop))
    assert scales.name == make_scale_name(MATRIX)
    for axis in range(2):
        touched = {element // BLOCK for element in range(start[axis], stop[axis])}
        assert set(range(scales.start[axis], scales.stop[axis])) == touched
