"""The tensors of a model by name and by layer, and shapes cut into parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.weights.layouts.tensors import (
    LayerKind,
    Tensors,
    cut_evenly,
    cut_halves,
    cut_rows,
    divide,
)
from mcore_rl.weights.models import family_of, hf_tensor_shapes
from tests.support.layout_strategies import models
from tests.support.megatron_layout import model_config


def tensors_of(**changes: object) -> Tensors:
    config = model_config(**changes)
    return Tensors(family_of(config), config, "bfloat16")


@given(models())
def test_all_names_are_those_of_the_family_and_each_is_found(config: dict) -> None:
    tensors = Tensors(family_of(config), config, "bfloat16")
    shapes = hf_tensor_shapes(config)
    experts = range(tensors.num_experts)
    names = [entry.tensor.name for entry in tensors.model_entries]
    for layer in range(tensors.num_layers):
        for name, entry, expert in tensors.list_layer_tensors(layer, experts):
            names.append(name)
            assert tensors.find(name) == (entry, layer, expert)
    assert sorted(names) == sorted(shapes)
    for name, shape in shapes.items():
        found = tensors.find(name)
        assert found is not None and found.entry.shape == shape
        assert name.endswith(found.entry.suffix.format(layer=found.layer, expert=found.expert))


def test_a_name_is_split_into_entry_layer_and_expert() -> None:
    found = tensors_of().find("model.layers.2.mlp.experts.3.up_proj.weight")
    assert found is not None
    assert (found.layer, found.expert, found.entry.dtype) == (2, 3, "bfloat16")
    assert found.entry.suffix == "mlp.experts.{expert}.up_proj.weight"


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.input_layernorm.weight",
        "model.layers.0.mlp.experts.4.up_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.other.weight",
    ],
)
def test_names_past_the_model_and_of_the_other_kind_of_layer_are_unknown(name: str) -> None:
    assert tensors_of().find(name) is None


def test_tied_embeddings_leave_the_output_layer_out() -> None:
    tied = tensors_of(tie_word_embeddings=True)
    assert tied.tied and tied.find("lm_head.weight") is None
    plain = tensors_of()
    assert not plain.tied and plain.find("lm_head.weight") is not None


def test_layers_are_sorted_by_kind() -> None:
    tensors = tensors_of()
    assert tensors.by_kind(range(3)) == {
        LayerKind(("moe", "softmax")): [0, 2],
        LayerKind(("dense", "softmax")): [1],
    }
    names = [name for name, _, _ in tensors.list_layer_tensors(0, experts=[1])]
    assert "model.layers.0.mlp.experts.1.up_proj.weight" in names
    assert not [name for name in names if ".experts." in name and ".experts.1." not in name]


def test_a_remainder_is_refused_with_both_numbers() -> None:
    assert divide(8, 4, "heads", "tp") == 2
    with pytest.raises(ValueError, match="tp = 3 does not divide heads = 8"):
        divide(8, 3, "heads", "tp")


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(0, 1))
def test_even_cuts_tile_the_tensor(rows: int, columns: int, parts: int, axis: int) -> None:
    shape = (rows * parts, columns * parts)
    cuts = cut_evenly(shape, axis, parts, "w")
    assert [start[axis] for start, _ in cuts] == [i * shape[axis] // parts for i in range(parts)]
    assert [stop[axis] for _, stop in cuts] == [
        (i + 1) * shape[axis] // parts for i in range(parts)
    ]
    assert {(start[1 - axis], stop[1 - axis]) for start, stop in cuts} == {(0, shape[1 - axis])}


def test_a_tensor_that_is_not_cut_is_one_part() -> None:
    assert cut_evenly((3, 5), None, 4, "w") == [((0, 0), (3, 5))]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (5, [((0, 0), (5, 2)), ((5, 0), (10, 2)), None]),
        (6, [((0, 0), (6, 2)), ((6, 0), (10, 2)), None]),
        (4, [((0, 0), (4, 2)), ((4, 0), (8, 2)), ((8, 0), (10, 2))]),
    ],
)
def test_rows_of_a_padded_table_end_with_the_table(rows: int, expected: list) -> None:
    assert cut_rows((10, 2), rows, 3) == expected


def test_each_part_has_its_rows_of_both_halves() -> None:
    assert cut_halves((8, 3), 0, 2, "fc1") == [
        [((0, 0), (2, 3)), ((4, 0), (6, 3))],
        [((2, 0), (4, 3)), ((6, 0), (8, 3))],
    ]
    assert cut_halves((8, 3), None, 1, "fc1") == [[((0, 0), (8, 3))]]
    with pytest.raises(ValueError, match="ranks = 6 does not divide axis 0 of fc1 = 8"):
        cut_halves((8, 3), 0, 3, "fc1")
