"""Megatron's layout by rule agrees with Megatron tensors built by hand."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.weights.layouts.layout import check_rank, list_boxes
from mcore_rl.weights.layouts.megatron import MegatronSizes
from mcore_rl.weights.layouts.training import make_training_shards
from mcore_rl.weights.models import family_of, hf_tensor_shapes
from tests.support.layout_strategies import megatron_layout, megatron_sizes, moe_models
from tests.support.megatron_layout import TrainLayout, hf_weights, model_config, train_ranks


@given(st.data())
@settings(max_examples=60)
def test_every_rank_holds_what_the_rule_says(data: st.DataObject) -> None:
    dense_layers, tied = data.draw(st.sampled_from([[], [0], [1]])), data.draw(st.booleans())
    config = data.draw(moe_models()) | {
        "mlp_only_layers": dense_layers,
        "tie_word_embeddings": tied,
    }
    sizes = data.draw(megatron_sizes(config))
    if sizes.stage_layers:
        return
    layout = megatron_layout(config, sizes)
    by_hand = TrainLayout(
        sizes.tp, sizes.pp, sizes.cp * sizes.dp, sizes.ep, sizes.etp, sizes.vpp or 1
    )
    ranks = train_ranks(config, hf_weights(hf_tensor_shapes(config)), by_hand)
    assert layout.num_ranks == len(ranks)
    for rank, held in enumerate(ranks):
        shards = make_training_shards(held.parts, family_of(config), config)
        check_rank(layout, rank, [replace(shard, dtype="float32") for shard in shards])
        assert len(set(layout.names(rank))) == len(list(layout.names(rank)))


def test_tied_embeddings_lie_on_the_first_and_the_last_stage() -> None:
    config = model_config(tie_word_embeddings=True, num_hidden_layers=2)
    layout = megatron_layout(config, MegatronSizes(16, tp=2, pp=2))
    assert list(layout.placement("model.embed_tokens.weight").pieces[0].ranks) == [0, 2]
    assert "lm_head.weight" not in set(layout.all_names())


def test_fewer_groups_than_ranks_are_cut_by_rows_of_the_fused_tensor() -> None:
    config = model_config(num_attention_heads=4, num_key_value_heads=1, head_dim=2)
    layout = megatron_layout(config, MegatronSizes(16, tp=2))
    held = {
        (rank, box.name.split(".")[-2]): (box.start[0], box.stop[0])
        for rank in range(2)
        for box, _ in list_boxes(layout, rank)
        if box.name.startswith("model.layers.0.self_attn")
        and box.name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")
    }
    assert held == {
        (0, "q_proj"): (0, 6),
        (1, "q_proj"): (6, 8),
        (1, "k_proj"): (0, 2),
        (1, "v_proj"): (0, 2),
    }


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (MegatronSizes(16, pp=2), r"pp \* vpp = 2 does not divide layers = 3"),
        (
            MegatronSizes(16, pp=2, stage_layers=(1, 1)),
            "2 stages with 2 layers together: .* the model has 3 layers",
        ),
        (
            MegatronSizes(16, pp=2, stage_layers=(1, 1, 1)),
            r"3 stages with 3 layers together: pp \* vpp = 2",
        ),
        (MegatronSizes(16, pp=3, vpp=2), r"pp \* vpp = 6 does not divide layers = 3"),
        (MegatronSizes(16, ep=3, dp=3), "ep = 3 does not divide experts = 4"),
        (MegatronSizes(16, tp=2, ep=4), r"ep \* etp = 4 does not divide tp \* cp \* dp = 2"),
        (MegatronSizes(15, tp=2), "tp = 2 does not divide padded vocabulary = 15"),
        (
            MegatronSizes(24, tp=3, dp=1),
            "tp = 3 does not divide attention heads = 4",
        ),
        (
            MegatronSizes(16, etp=8, dp=8),
            "ranks = 8 does not divide axis 0 of Megatron's .*linear_fc1",
        ),
    ],
)
def test_what_does_not_divide_is_named(sizes: MegatronSizes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout = megatron_layout(model_config(), sizes)
        for name in layout.all_names():
            layout.placement(name)
