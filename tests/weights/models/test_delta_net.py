"""Qwen3-Next and Qwen3.5: whose rows lie where, which layers have what, and what is refused."""

from typing import Any

import pytest

from mcore_rl.config import ParallelConfig
from mcore_rl.weights.layouts.tensors import Tensors, cut_blocks
from mcore_rl.weights.models import family_of, refuse_unsupported
from mcore_rl.weights.models.qwen_delta_net import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from mcore_rl.weights.models.recipe_checks import check_layout, check_sharing
from mcore_rl.weights.models.table import Family

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 13,
    "hidden_size": 8,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 2,
    "linear_value_head_dim": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "intermediate_size": 8,
    "moe_intermediate_size": 4,
    "shared_expert_intermediate_size": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
LAYER = "decoder.layers.self_attention."


def list_rows(family: Family, key: str) -> list[tuple[str, int, int]]:
    """Return (HF name in the layer, first row, rows) of each block of a Megatron tensor."""
    rule, _ = family.find(LAYER + key)
    return [
        (str(block.tensor and block.tensor.name.split(".")[-2]), block.hf_start, block.num_rows)
        for block in rule.list_blocks(family.sizes(CONFIG))
    ]


def test_a_gate_lies_behind_the_queries_of_a_head_in_files_and_of_a_group_in_megatron() -> None:
    group = [("q_proj", 0, 2), ("q_proj", 4, 2), ("q_proj", 2, 2), ("q_proj", 6, 2)]
    group += [("k_proj", 0, 2), ("v_proj", 0, 2)]
    assert list_rows(QWEN3_NEXT, "linear_qkv.weight")[:6] == group
    assert list_rows(QWEN3_NEXT, "linear_qkv.weight")[6:] == [
        (name, first + (8 if name == "q_proj" else 2), rows) for name, first, rows in group
    ]


@pytest.mark.parametrize(
    ("key", "by_head", "by_part"),
    [
        ("query", [("in_proj_qkvz", 0, 2), ("in_proj_qkvz", 16, 2)], ("in_proj_qkv", 0, 4)),
        ("key", [("in_proj_qkvz", 2, 2), ("in_proj_qkvz", 18, 2)], ("in_proj_qkv", 4, 4)),
        ("value", [("in_proj_qkvz", 4, 6), ("in_proj_qkvz", 20, 6)], ("in_proj_qkv", 8, 12)),
        ("z", [("in_proj_qkvz", 10, 6), ("in_proj_qkvz", 26, 6)], ("in_proj_z", 0, 12)),
        ("beta", [("in_proj_ba", 0, 2), ("in_proj_ba", 4, 2)], ("in_proj_b", 0, 4)),
        ("alpha", [("in_proj_ba", 2, 2), ("in_proj_ba", 6, 2)], ("in_proj_a", 0, 4)),
    ],
)
def test_inputs_of_a_delta_net_lie_head_by_head_or_part_by_part(
    key: str, by_head: list[tuple[str, int, int]], by_part: tuple[str, int, int]
) -> None:
    assert list_rows(QWEN3_NEXT, f"in_proj.weight.{key}") == by_head
    assert list_rows(QWEN3_5, f"in_proj.weight.{key}") == [by_part]


def test_the_fourth_layer_has_softmax_attention() -> None:
    kinds = [QWEN3_NEXT.is_linear(CONFIG, layer) for layer in range(4)]
    assert kinds == [True, True, True, False]
    shapes = QWEN3_NEXT.shapes(CONFIG)
    assert shapes["model.layers.0.linear_attn.conv1d.weight"] == (20, 1, 3)
    assert shapes["model.layers.3.self_attn.q_proj.weight"] == (16, 8)
    assert "model.layers.3.linear_attn.A_log" not in shapes
    assert "model.layers.0.self_attn.q_proj.weight" not in shapes
    named = {**CONFIG, "layer_types": ["full_attention", "linear_attention"] * 2}
    assert QWEN3_5.is_linear(named, 1) and not QWEN3_5.is_linear(named, 0)


def test_norms_begin_at_zero_apart_from_that_of_a_delta_nets_outputs() -> None:
    initial = QWEN3_5_MOE.list_initial(CONFIG)
    zeros = {name for name, kind in initial.items() if kind == "zeros"}
    norms = {name for name in initial if name.endswith("norm.weight")}
    assert norms - zeros == {f"model.layers.{i}.linear_attn.norm.weight" for i in range(3)}
    assert initial["model.layers.0.linear_attn.A_log"] == "log"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        ({"layer_types": ["full_attention"] * 4}, "full_attention_interval=4"),
        ({"linear_num_key_heads": 3}, "linear_num_key_heads=3 does not divide"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"rope_theta": None}, "rope_theta"),
    ],
)
def test_other_models_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    refuse_unsupported(CONFIG)
    with pytest.raises(ValueError, match=message):
        refuse_unsupported({**CONFIG, **changes})


def test_tensor_and_context_parallelism_divide_the_key_heads_of_delta_nets() -> None:
    check_layout(CONFIG, ParallelConfig(tp=2))
    with pytest.raises(ValueError, match=r"tp \* parallel.cp=4 does not divide linear_num"):
        check_layout(CONFIG, ParallelConfig(tp=2, cp=2))


def test_sequences_do_not_share_beginnings_with_linear_attention() -> None:
    with pytest.raises(ValueError, match="linear attention"):
        check_sharing(CONFIG, ParallelConfig())


def test_tensors_of_the_layer_for_further_tokens_are_carried() -> None:
    assert family_of(CONFIG).is_carried(CONFIG, "mtp.layers.0.self_attn.q_proj.weight")
    assert not family_of(CONFIG).is_carried(CONFIG, "model.layers.4.self_attn.q_proj.weight")


def list_own_rows(name: str, parts: int) -> list[list[tuple[int, int]]]:
    """Return the rows [first, last) of an HF tensor of layer 0 or 3 that each of `parts` has."""
    tensors = Tensors(QWEN3_NEXT, CONFIG, "float32")
    found = tensors.find(name)
    assert found is not None
    cuts = cut_blocks(found.entry, tensors.sizes, parts)
    return [[(start[0], stop[0]) for start, stop in boxes] for boxes in cuts]


def test_a_rank_has_its_heads_rows_of_each_part() -> None:
    convolution = list_own_rows("model.layers.0.linear_attn.conv1d.weight", 2)
    assert convolution == [[(0, 2), (4, 6), (8, 14)], [(2, 4), (6, 8), (14, 20)]]
    inputs = list_own_rows("model.layers.0.linear_attn.in_proj_qkvz.weight", 2)
    assert inputs == [[(0, 16)], [(16, 32)]]
    queries = list_own_rows("model.layers.3.self_attn.q_proj.weight", 4)
    assert queries == [[(0, 6)], [(6, 8)], [(8, 14)], [(14, 16)]]
