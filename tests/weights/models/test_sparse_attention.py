"""The tables of DeepSeek-V3.2 and GLM-5 against the published configurations."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config import ParallelConfig
from mcore_rl.weights.models import family_of, refuse_unsupported
from mcore_rl.weights.models.deepseek import DEEPSEEK_V3
from mcore_rl.weights.models.recipe_checks import check_layout
from mcore_rl.weights.models.sparse_attention import (
    DEEPSEEK_V32,
    GLM5,
    find_sharing,
    list_indexers,
)

FOLDERS = {"deepseek_v32": DEEPSEEK_V32, "glm_5": GLM5}


def config_of(model: str) -> dict[str, Any]:
    return json.loads(Path(f"recipes/model/{model}/config.json").read_text())


@pytest.mark.parametrize(("model", "billions"), [("deepseek_v32", 672), ("glm_5", 744)])
def test_parameters_add_up_to_the_published_number(model: str, billions: int) -> None:
    """DeepSeek-V3.2 is DeepSeek-V3, of 671 billion, with indexers; GLM-5's card says 744."""
    config = config_of(model)
    assert family_of(config) is FOLDERS[model]
    refuse_unsupported(config)
    assert round(sum(map(prod, FOLDERS[model].shapes(config).values())) / 1e9) == billions


def test_v32_is_v3_with_an_indexer_in_each_layer() -> None:
    config = config_of("deepseek_v32")
    more = DEEPSEEK_V32.shapes(config)
    for name, shape in DEEPSEEK_V3.shapes(config_of("deepseek_v3")).items():
        assert more.pop(name) == shape
    assert {name.split(".", 3)[3]: shape for name, shape in more.items()} == {
        "self_attn.indexer.wq_b.weight": (64 * 128, 1536),
        "self_attn.indexer.wk.weight": (128, 7168),
        "self_attn.indexer.k_norm.weight": (128,),
        "self_attn.indexer.k_norm.bias": (128,),
        "self_attn.indexer.weights_proj.weight": (64, 7168),
    }
    assert len(more) == 61 * 5


def test_settings_of_the_indexer_become_megatrons() -> None:
    options = DEEPSEEK_V32.options(config_of("deepseek_v32"))
    assert options["experimental_attention_variant"] == "dsa"
    assert (options["dsa_indexer_n_heads"], options["dsa_indexer_head_dim"]) == (64, 128)
    assert options["dsa_indexer_topk"] == 2048
    assert options["dsa_indexer_k_norm_epsilon"] == 1e-6
    assert not options["dsa_indexer_rope_interleaved"]
    assert not options["dsa_indexer_rotate_activation"]
    glm = GLM5.options(config_of("glm_5"))
    assert glm["dsa_indexer_rope_interleaved"]
    assert (glm["dsa_indexer_n_heads"], glm["dsa_indexer_k_norm_epsilon"]) == (32, 1e-6)
    assert (glm["rope_type"], glm["rotary_base"]) == ("rope", 1e6)


def test_layers_that_predict_further_tokens_lie_beside_the_model() -> None:
    for model, family in FOLDERS.items():
        config = config_of(model)
        last = config["num_hidden_layers"]
        assert family.is_carried(config, f"model.layers.{last}.self_attn.indexer.wk.weight")
        assert not family.is_carried(config, f"model.layers.{last - 1}.self_attn.indexer.wk.weight")


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("deepseek_v32", {"quantization_config": {"quant_method": "fp8"}}, "mcore-rl-ckpt dequan"),
        ("deepseek_v32", {"index_topk": None}, "lacks 'index_topk'"),
        ("deepseek_v32", {"index_topk": 0}, "index_topk=0"),
        ("deepseek_v32", {"index_head_dim": 32}, "index_head_dim=32.*qk_rope_head_dim=64"),
        ("deepseek_v32", {"q_lora_rank": None}, "lacks 'q_lora_rank'"),
        ("deepseek_v32", {"indexer_rope_interleave": True}, "interleave=True.*only False"),
        ("deepseek_v32", {"layer_types": ["full_attention"] * 61}, "layer_types=.*every layer"),
        ("deepseek_v32", {"index_kpool": 4}, "index_kpool=4.*only 1"),
        ("glm_5", {"indexer_rope_interleave": False}, "interleave=False.*only True"),
        ("deepseek_v32", {"index_topk_freq": 4}, "index_topk_freq=4.*only 1"),
        ("deepseek_v32", {"index_topk_pattern": "F" * 60 + "S"}, "FFFF.* share .*family does not"),
        ("glm_5", {"index_topk_pattern": "SF" * 39}, "SFSF.* begin with one that shares"),
        ("glm_5", {"index_topk_pattern": "FFS" * 25 + "FSS"}, "FFSFFS.* at equal distances"),
        ("glm_5", {"index_topk_pattern": "FX" * 39}, "of kinds X, full: expected 78 of full and"),
        ("glm_5", {"indexer_types": ["full", "shared"]}, "with 2 layers .*: expected 78 of full"),
        ("glm_5", {"mlp_layer_types": ["sparse"] * 78}, "first_k_dense_replace=3 says"),
        ("glm_5", {"rope_parameters": {"rope_type": "default"}}, "lacks 'rope_theta'"),
    ],
)
def test_what_is_not_carried_is_refused_by_name(
    model: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        refuse_unsupported(config_of(model) | changes)


def test_how_glm_turns_heads_of_its_indexer_must_be_said() -> None:
    """Without the key transformers and SGLang would differ."""
    config = config_of("glm_5")
    del config["indexer_rope_interleave"]
    with pytest.raises(ValueError, match="lacks 'indexer_rope_interleave'"):
        refuse_unsupported(config)
    refuse_unsupported(config_of("deepseek_v32"))


@pytest.mark.parametrize(
    ("changes", "sharing"),
    [
        ({}, (1, 1)),
        ({"index_topk_freq": 4}, (4, 2)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, (4, 3)),
        ({"index_topk_pattern": "FFFSSS" * 13, "index_topk_freq": 2}, None),
        ({"index_topk_pattern": "FS" * 39}, (2, 1)),
        ({"indexer_types": ["full"] * 6 + ["shared", "shared", "full"] * 24}, (3, 6)),
    ],
)
def test_layers_without_an_indexer_are_told_to_megatron(
    changes: dict[str, Any], sharing: tuple[int, int] | None
) -> None:
    config = config_of("glm_5") | changes
    indexers = list_indexers(config)
    assert find_sharing(config) == sharing
    names = {name for name in GLM5.shapes(config) if name.endswith("indexer.wk.weight")}
    assert names == {
        f"model.layers.{layer}.self_attn.indexer.wk.weight"
        for layer, has_indexer in enumerate(indexers)
        if has_indexer
    }
    if sharing:
        refuse_unsupported(config)
        options = GLM5.options(config)
        found = options["dsa_indexer_topk_freq"], options["dsa_indexer_skip_topk_offset"]
        assert found == sharing


def test_a_pipeline_stage_begins_with_an_indexer() -> None:
    config = config_of("glm_5") | {"index_topk_freq": 4}  # layers 1, 5, 9 and so on have one
    check_layout(config, ParallelConfig(pp=2, stage_layers=[37, 41]))
    with pytest.raises(ValueError, match=r"stage_layers=\[39, 39\].*begin with layer 39"):
        check_layout(config, ParallelConfig(pp=2))
