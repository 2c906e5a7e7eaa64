"""Where words and scales of routed experts lie, on both sides of a sync."""

from dataclasses import replace

import pytest

from mcore_rl.weights.layouts.layout import NOWHERE, list_boxes
from mcore_rl.weights.layouts.listed import RecordedLayouts
from mcore_rl.weights.layouts.megatron import MegatronSizes
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from tests.support.megatron_layout import model_config

EXPERT = "model.layers.1.mlp.experts.3"
SIZES = {"num_hidden_layers": 4, "hidden_size": 64, "moe_intermediate_size": 128}
CONFIG = model_config(**SIZES, mlp_only_layers=[])
PLAIN = RecordedLayouts(CONFIG, "bfloat16", MegatronSizes(128, tp=2, etp=2), SGLangSizes(tp=4))
PACKED = replace(PLAIN, quantization="int4")
HIDDEN = CONFIG["hidden_size"]


def test_words_and_scales_take_the_place_of_matrices_of_experts_alone() -> None:
    plain, packed = PLAIN.source().hf_tensors(), PACKED.source().hf_tensors()
    matrices = {name for name in plain if ".experts." in name}
    assert matrices
    kept = {name: plain[name] for name in plain.keys() - matrices}
    assert kept.items() <= packed.items()
    assert packed.keys() - kept.keys() == {
        name + suffix for name in matrices for suffix in ("_packed", "_scale")
    }
    assert packed[f"{EXPERT}.up_proj.weight_packed"] == ((128, HIDDEN // 8), "int32")
    assert packed[f"{EXPERT}.up_proj.weight_scale"] == ((128, HIDDEN // 32), "bfloat16")


@pytest.mark.parametrize("side", ["source", "target"])
def test_each_rank_has_the_words_and_scales_of_its_part(side: str) -> None:
    plain, packed = getattr(PLAIN, side)(), getattr(PACKED, side)()
    assert set(packed.all_names()) == set(PACKED.source().hf_tensors())
    for rank in range(packed.num_ranks):
        parts = {box.name: (box, dtype) for box, dtype in list_boxes(packed, rank)}
        for box, dtype in list_boxes(plain, rank):
            if ".experts." not in box.name:
                assert parts[box.name] == (box, dtype)
                continue
            for suffix, columns, packed_dtype in (
                ("_packed", 8, "int32"),
                ("_scale", 32, "bfloat16"),
            ):
                part, part_dtype = parts[box.name + suffix]
                assert part_dtype == packed_dtype
                assert part.start == (box.start[0], box.start[1] // columns)
                assert part.stop == (box.stop[0], box.stop[1] // columns)
    assert packed.placement(f"{EXPERT}.up_proj.weight") is NOWHERE
    assert packed.placement(f"{EXPERT}.up_proj.weight_shape") is NOWHERE


def test_a_part_that_cuts_a_group_is_refused_by_rank() -> None:
    narrow = replace(PACKED, hf_config={**CONFIG, "moe_intermediate_size": 64})
    with pytest.raises(ValueError, match=r"rank 0 holds columns 0 to 16 .* groups of 32 columns"):
        narrow.target().placement(f"{EXPERT}.down_proj.weight_packed")


def test_layouts_survive_their_way_as_json() -> None:
    assert RecordedLayouts.decode(PACKED.encode()) == PACKED
