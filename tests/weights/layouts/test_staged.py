"""Both sides place tensors by stage and expert group; counts per rank agree with the placements."""

from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.weights.layouts.layout import NOWHERE, PlacedPiece, Placement, Ranks, list_boxes
from mcore_rl.weights.layouts.megatron import MegatronLayout, MegatronSizes
from mcore_rl.weights.layouts.sglang import SGLangLayout
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from mcore_rl.weights.layouts.tensors import Entry, StagedLayout, Tensors
from mcore_rl.weights.models import family_of, hf_tensor_shapes
from tests.support.layout_strategies import (
    megatron_layout,
    megatron_sizes,
    models,
    sglang_layout,
    sglang_sizes,
)
from tests.support.megatron_layout import model_config


def make_layout(
    data: st.DataObject, config: dict[str, Any], side: str
) -> MegatronLayout | SGLangLayout:
    if side == "trainer":
        return megatron_layout(config, data.draw(megatron_sizes(config)))
    return sglang_layout(config, data.draw(sglang_sizes()))


@pytest.mark.parametrize("side", ["trainer", "engines"])
@given(st.data())
@settings(max_examples=40)
def test_held_elements_are_those_of_the_boxes(side: str, data: st.DataObject) -> None:
    layout = make_layout(data, data.draw(models()), side)
    for rank in range(layout.num_ranks):
        boxes = sum(box.numel for box, _ in list_boxes(layout, rank))
        assert sum(numel for _, numel in layout.count_held(rank)) == boxes


@pytest.mark.parametrize("side", ["trainer", "engines"])
@given(st.data())
@settings(max_examples=40)
def test_pieces_tile_every_tensor_and_every_holder_names_it(side: str, data: st.DataObject) -> None:
    config = data.draw(models())
    layout = make_layout(data, config, side)
    shapes = hf_tensor_shapes(config)
    assert sorted(layout.all_names()) == sorted(shapes)
    names = [set(layout.names(rank)) for rank in range(layout.num_ranks)]
    for name, shape in shapes.items():
        pieces = layout.placement(name).pieces
        sizes = [prod(b - a for a, b in zip(p.start, p.stop, strict=True)) for p in pieces]
        assert sum(sizes) == prod(shape)
        holders = {rank for piece in pieces for rank in piece.ranks}
        assert holders <= {rank for rank, held in enumerate(names) if name in held}


def test_tensors_of_a_stage_and_group_share_a_placement() -> None:
    config = model_config(mlp_only_layers=[], num_hidden_layers=4)
    layout = megatron_layout(config, MegatronSizes(padded_vocab=128, pp=2, dp=2, ep=2))
    up_proj = "model.layers.{}.mlp.experts.{}.up_proj.weight"
    first = layout.placement(up_proj.format(0, 0))
    assert layout.placement(up_proj.format(1, 1)) is first
    assert layout.placement(up_proj.format(2, 0)) is not first
    assert layout.placement(up_proj.format(0, 2)) is not first
    assert layout.placement("model.layers.4.mlp.gate.weight") is NOWHERE


def test_stacked_experts_have_a_piece_per_group() -> None:
    config = model_config(
        architectures=["GptOssForCausalLM"], num_local_experts=4, num_experts=None
    )
    layout = sglang_layout(config, SGLangSizes(engines=2, tp=2))
    pieces = layout.placement("model.layers.0.mlp.experts.down_proj").pieces
    assert [(piece.start[0], piece.stop[0]) for piece in pieces] == [(0, 4), (0, 4)]
    assert [list(piece.ranks) for piece in pieces] == [[0, 2], [1, 3]]


class TwoStages(StagedLayout):
    """Layer 0 on rank 0, layers 1 and 2 on rank 1; what lies outside the layers on both."""

    num_ranks = 2

    def _layers_and_group(self, rank: int) -> tuple[range, int]:
        return (range(1), 0) if rank == 0 else (range(1, 3), 0)

    def _make_placement(self, entry: Entry, stage: int | None, ep: int | None) -> Placement:
        ranks = Ranks.from_iterable(range(2) if stage is None else [stage])
        return Placement((PlacedPiece((0,) * len(entry.shape), entry.shape, ranks, entry.dtype),))


def test_a_layout_of_two_stages_names_and_counts_what_each_rank_holds() -> None:
    config = model_config()
    tensors = Tensors(family_of(config), config, "bfloat16")
    layout = TwoStages(tensors, {0: 0, 1: 1, 2: 1}, experts_per_rank=4)
    shapes = hf_tensor_shapes(config)
    for rank, layers in enumerate(({"0"}, {"1", "2"})):
        wanted = {
            name
            for name in shapes
            if not name.startswith("model.layers.") or name.split(".")[2] in layers
        }
        assert set(layout.names(rank)) == wanted
        assert sum(numel for _, numel in layout.count_held(rank)) == sum(
            prod(shapes[n]) for n in wanted
        )
        for name in wanted:
            assert any(rank in piece.ranks for piece in layout.placement(name).pieces), name
    assert layout.placement("model.layers.3.input_layernorm.weight") is NOWHERE
