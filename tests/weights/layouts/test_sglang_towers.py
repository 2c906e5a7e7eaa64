"""The parts of a tower's tensor on each rank. tests/scenarios/rollout compares them with SGLang."""

from pathlib import Path
from typing import Any

import pytest

from mcore_rl.weights.hf.config import read_hf_config
from mcore_rl.weights.layouts.layout import COLUMNS, WHOLE, EngineRule
from mcore_rl.weights.layouts.sglang import SGLangLayout
from mcore_rl.weights.layouts.sglang_models import SGLangSizes, refuse_unserved
from mcore_rl.weights.layouts.sglang_towers import QWEN2_5_TOWER, cut_tower, find_tower_rule
from mcore_rl.weights.layouts.tensors import Tensors
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.moonvit import KIMI_VL
from mcore_rl.weights.models.qwen_vl import QWEN2_5_VL
from tests.support.tiny_kimi_vl import write_kimi_vl_model
from tests.weights.models.test_qwen2_5_vl import FLAT
from tests.weights.models.test_qwen3_vl import CONFIG, MOE_CONFIG, with_tower


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
    tensors = Tensors(QWEN2_5_VL, FLAT, "bfloat16")
    rules = {e.suffix: find_tower_rule(QWEN2_5_VL.architecture, e) for e in tensors.model_entries}
    assert rules["visual.blocks.1.attn.qkv.bias"] == QWEN2_5_TOWER["blocks.attn.qkv"]
    assert rules["visual.blocks.1.norm2.weight"] == WHOLE
    assert all((rule is not None) == name.startswith("visual.") for name, rule in rules.items())


def test_the_table_of_positions_lies_on_the_first_stage_padded() -> None:
    config = {**CONFIG, "num_hidden_layers": 6}
    layout = SGLangLayout(family_of(config), config, SGLangSizes(tp=2, pp=2), "bfloat16")
    [piece] = layout.placement("model.visual.pos_embed.weight").pieces
    assert (piece.start, piece.stop, list(piece.ranks)) == ((0, 0), (25, 32), [0])
    patches = layout.placement("model.visual.patch_embed.proj.bias").pieces
    assert sorted(rank for piece in patches for rank in piece.ranks) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        (
            {},
            SGLangSizes(pp=2),
            "pp = 2: .* has only 2 of the 3 layers that take features",
        ),
        (
            with_tower(deepstack_visual_indexes=[1]),
            SGLangSizes(),
            "deepstack_visual_indexes with 1 entries: .* behind 3 layers",
        ),
        (
            {"rms_norm_eps": 1e-5},
            SGLangSizes(),
            "rms_norm_eps = 1e-05: .* the norms of the tower",
        ),
    ],
)
def test_towers_that_sglang_computes_otherwise_are_refused(
    changes: dict[str, Any], sizes: SGLangSizes, message: str
) -> None:
    refuse_unserved(MOE_CONFIG, SGLangSizes())
    refuse_unserved({**CONFIG, **with_tower(deepstack_visual_indexes=[1])}, SGLangSizes(pp=2))
    with pytest.raises(ValueError, match=message):
        refuse_unserved({**MOE_CONFIG, **changes}, sizes)


def test_moonvit_is_cut_and_its_projector_is_not(tmp_path: Path) -> None:
    config = read_hf_config(write_kimi_vl_model(tmp_path))
    entries = Tensors(KIMI_VL, config, "bfloat16").model_entries
    rules = {e.suffix: find_tower_rule(KIMI_VL.architecture, e) for e in entries}
    assert rules["vision_tower.encoder.blocks.1.wqkv.bias"] == EngineRule("attention", blocks=3)
    assert rules["multi_modal_projector.linear_1.weight"] == WHOLE
    assert rules["language_model.lm_head.weight"] is None
