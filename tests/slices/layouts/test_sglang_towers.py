"""The parts of a tower's tensor on each rank. tests/scenarios/rollout compares them with SGLang."""

import pytest

from mcore_rl.slices.families.qwen2_5_vl import FAMILY
from mcore_rl.slices.layouts.engine_rule import COLUMNS, WHOLE, EngineRule
from mcore_rl.slices.layouts.sglang_towers import QWEN2_5_TOWER, cut_tower, tower_rule_of
from mcore_rl.slices.layouts.tensors import Tensors
from tests.slices.families.test_qwen2_5_vl import FLAT


def test_each_rank_has_its_rows_of_every_block() -> None:
    rule = EngineRule("attention", blocks=3)
    assert cut_tower((12,), rule, 2, "qkv") == [
        [((0,), (2,)), ((4,), (6,)), ((8,), (10,))],
        [((2,), (4,)), ((6,), (8,)), ((10,), (12,))],
    ]
    with pytest.raises(ValueError, match="ranks = 15 does not divide axis 0 of qkv = 12"):
        cut_tower((12,), rule, 5, "qkv")


def test_padding_at_the_end_of_an_axis_is_on_the_last_ranks() -> None:
    rule = EngineRule("tensor", COLUMNS, multiple=8)
    assert cut_tower((2, 4), rule, 4, "down_proj") == [
        [((0, 0), (2, 2))],
        [((0, 2), (2, 4))],
        [],
        [],
    ]
    assert cut_tower((2, 44), rule, 2, "down_proj") == [
        [((0, 0), (2, 24))],
        [((0, 24), (2, 44))],
    ]
    with pytest.raises(
        ValueError, match="ranks = 3 does not divide padded axis 1 of down_proj = 8"
    ):
        cut_tower((2, 4), rule, 3, "down_proj")


def test_every_tensor_of_the_tower_has_a_rule_and_others_have_none() -> None:
    tensors = Tensors(FAMILY, FLAT, "bfloat16")
    rules = {e.suffix: tower_rule_of(FAMILY.architecture, e) for e in tensors.model_entries}
    assert rules["visual.blocks.1.attn.qkv.bias"] == QWEN2_5_TOWER["blocks.attn.qkv"]
    assert rules["visual.blocks.1.norm2.weight"] == WHOLE
    assert all((rule is not None) == name.startswith("visual.") for name, rule in rules.items())
