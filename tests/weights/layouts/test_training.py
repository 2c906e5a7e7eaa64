"""Training shards agree with Megatron tensors built by hand, in several layouts."""

import dataclasses

import pytest
import torch

from mcore_rl.weights.layouts.training import LocalPart, list_training_padding, make_training_shards
from mcore_rl.weights.models import family_of, hf_tensor_shapes
from mcore_rl.weights.plan.coverage import check_coverage
from tests.support.megatron_layout import TrainLayout, hf_weights, model_config, train_ranks

LAYOUTS = [
    TrainLayout(),
    TrainLayout(layer_axis=False),
    TrainLayout(tp=2, etp=2),
    TrainLayout(tp=4, ep=2, etp=2),
    TrainLayout(tp=2, pp=3, dp=2, ep=4),
    TrainLayout(pp=1, vpp=3, dp=2, ep=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_shards_view_the_hf_elements_they_name(layout, tied):
    config = model_config(tie_word_embeddings=tied)
    family = family_of(config)
    weights = hf_weights(hf_tensor_shapes(config))
    seen = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    for rank in train_ranks(config, weights, layout):
        shards = make_training_shards(rank.parts, family, config)
        padding = list_training_padding(rank.parts, family, config)
        check_coverage(
            shards, padding, {name: tensor.numel() for name, tensor in rank.tensors.items()}
        )
        for shard in shards:
            box = tuple(map(slice, shard.box.start, shard.box.stop))
            assert torch.equal(shard.view(rank.tensors), weights[shard.box.name][box]), shard
            seen[shard.box.name][box] += 1
        for part in padding:
            assert not part.view(rank.tensors).any()
    assert all(count.min() > 0 for count in seen.values())


def parts_of(config: dict, layout: TrainLayout) -> list[LocalPart]:
    return train_ranks(config, hf_weights(hf_tensor_shapes(config)), layout)[0].parts


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        (
            "decoder.final_layernorm.weight",
            {"key": "decoder.norm.weight"},
            "'decoder.norm.weight' is not in",
        ),
        (
            "decoder.final_layernorm.weight",
            {"global_shape": (9,)},
            r"has shape \(9,\).*should be \(8,\)",
        ),
        ("embedding.word_embeddings.weight", {"global_shape": (12, 8)}, r"should be \(13, 8\)"),
        (
            "decoder.layers.mlp.router.weight",
            {"local_shape": (2, 4, 8)},
            "size 1 for each of .'layer'",
        ),
        (
            "decoder.layers.pre_mlp_layernorm.weight",
            {"global_offset": (1, 0)},
            "layer 1 is not a moe layer",
        ),
    ],
)
def test_what_the_config_does_not_describe_is_refused_by_name(key, change, message):
    config = model_config()
    part = next(part for part in parts_of(config, TrainLayout()) if part.key == key)
    with pytest.raises(ValueError, match=message):
        make_training_shards([dataclasses.replace(part, **change)], family_of(config), config)


def test_own_output_weights_of_a_tied_model_are_refused():
    parts = parts_of(model_config(), TrainLayout())
    tied = model_config(tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"output_layer.weight.*tie_word_embeddings"):
        make_training_shards(parts, family_of(tied), tied)


def test_a_corrupted_table_is_noticed():
    config = model_config()
    family = family_of(config)
    rank = train_ranks(config, hf_weights(hf_tensor_shapes(config)), TrainLayout())[0]
    rules = [dataclasses.replace(rule, groups=None) for rule in family.rules]
    corrupted = dataclasses.replace(family, rules=tuple(rules))
    wrong = [
        shard
        for shard in make_training_shards(rank.parts, corrupted, config)
        if shard not in make_training_shards(rank.parts, family, config)
    ]
    assert {shard.box.name.split(".")[-2] for shard in wrong} == {"q_proj", "k_proj", "v_proj"}
    smaller = dataclasses.replace(family, sizes=lambda config: {**family.sizes(config), "kv": 2})
    with pytest.raises(ValueError, match=r"linear_qkv.weight has shape"):
        make_training_shards(rank.parts, smaller, config)
