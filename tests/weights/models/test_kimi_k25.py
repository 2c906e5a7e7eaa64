"""Kimi-K2.5's table names every tensor of the published checkpoint, in the published shapes."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.weights.box import itemsize
from mcore_rl.weights.hf.config import read_hf_config, with_text_settings
from mcore_rl.weights.hf.int4 import is_int4
from mcore_rl.weights.models import refuse_unsupported
from mcore_rl.weights.models.moonvit import KIMI_K25
from mcore_rl.weights.models.settings import drop_quantization
from tests.support.kimi_k25_published import CONFIG, GIB, NUM_TENSORS, list_tensors
from tests.support.policy import ROOT
from tests.support.tiny_kimi_k25 import write_int4_kimi_k25_model

VISION = CONFIG["vision_config"]


def test_the_table_is_that_of_the_published_files() -> None:
    config = with_text_settings(CONFIG)
    assert is_int4(CONFIG)
    refuse_unsupported(drop_quantization(config))
    left = dict(KIMI_K25.shapes(config))
    dtypes = KIMI_K25.dtypes(config, "bfloat16")
    num_tensors = num_bytes = 0
    for name, shape, dtype in list_tensors():
        num_tensors += 1
        num_bytes += prod(shape) * itemsize(dtype)
        if name.endswith("weight_packed"):
            rows, words = shape
            assert left.pop(name.removesuffix("_packed")) == (rows, 8 * words)
        elif not name.endswith(("weight_scale", "weight_shape")) and not KIMI_K25.is_carried(
            config, name
        ):
            assert left.pop(name) == shape, name
            assert dtypes[name] == dtype, name
    assert not left
    assert num_tensors == NUM_TENSORS
    assert num_bytes == pytest.approx(GIB * 2**30, rel=1e-4)


def test_published_settings_become_those_of_kimi_k2(tmp_path: Path) -> None:
    options = KIMI_K25.options(with_text_settings(CONFIG))
    assert (options["num_moe_experts"], options["moe_router_topk"]) == (384, 8)
    assert (options["rotary_base"], options["rotary_scaling_factor"]) == (50000.0, 64.0)
    assert options["rope_type"] == "yarn" and options["moe_router_topk_scaling_factor"] == 2.827
    assert KIMI_K25.embedding == "language_model.model.embed_tokens.weight"
    assert KIMI_K25.has_tower
    config = read_hf_config(write_int4_kimi_k25_model(tmp_path / "hf"))
    assert "quantization_config" not in json.dumps(config)


def test_layers_for_speculation_may_lie_beside_the_model() -> None:
    config = with_text_settings(CONFIG)
    mtp = "language_model.model.layers.61.eh_proj.weight"
    assert not KIMI_K25.is_carried(config, mtp)
    assert KIMI_K25.is_carried({**config, "num_nextn_predict_layers": 1}, mtp)
    assert not KIMI_K25.is_carried(config, "language_model.model.layers.60.mlp.gate.weight")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ({"rope_scaling": None, "rope_theta": None}, "lacks 'rope_theta'"),
        ({"n_group": None, "routed_scaling_factor": None}, "lacks"),
        ({"media_placeholder_token_id": None}, "lacks 'media_placeholder_token_id'"),
        ({"media_placeholder_token_id": 163840}, "media_placeholder_token_id=163840"),
        ({"media_placeholder_token_id": "6"}, "media_placeholder_token_id='6'"),
        ({"vision_config": {**VISION, "vt_num_hidden_layers": 10**9}}, "vt_num_hidden_layers"),
        ({"vision_config": {**VISION, "vt_num_attention_heads": 0}}, "vt_num_attention_heads=0"),
        ({"vision_config": {**VISION, "vt_hidden_size": "big"}}, "vt_hidden_size='big'"),
        ({"vision_config": {**VISION, "init_pos_emb_height": None}}, "'init_pos_emb_height'"),
        ({"vision_config": {**VISION, "merge_kernel_size": 2}}, "merge_kernel_size=2"),
        ({"vision_config": {**VISION, "patch_size": 16}}, "patch_size=16 of vision_config"),
        ({"vision_config": {**VISION, "merge_type": "sd2"}}, "merge_type='sd2'"),
        ({"vision_config": {**VISION, "mm_projector_type": "mlp"}}, "mm_projector_type='mlp'"),
        ({"vision_config": {**VISION, "projector_ln_eps": 1e-6}}, "projector_ln_eps=1e-06"),
        ({"vision_config": {**VISION, "text_hidden_size": 64}}, "text_hidden_size=64 .* be 7168"),
        ({"vision_config": {**VISION, "mm_hidden_size": 64}}, "mm_hidden_size=64 .* be 1152"),
        ({"vision_config": {**VISION, "vt_num_attention_heads": 5}}, "multiple of 4"),
        ({"vision_config": {**VISION, "vt_num_hidden_layers": None}}, "'vt_num_hidden_layers'"),
    ],
)
def test_other_settings_are_refused(change: dict[str, Any], message: str) -> None:
    config = drop_quantization({**with_text_settings(CONFIG), **change})
    for key in [key for key, value in change.items() if value is None]:
        del config[key]
    with pytest.raises(ValueError, match=message):
        refuse_unsupported(config)


def test_the_recipes_model_is_the_published_one() -> None:
    config = read_hf_config(ROOT / "recipes/model/kimi_k25")
    published = with_text_settings(CONFIG)
    assert KIMI_K25.options(config) == KIMI_K25.options(published)
    assert KIMI_K25.shapes(config) == KIMI_K25.shapes(published)
    assert config["vision_config"] == published["vision_config"]
    assert config["max_position_embeddings"] == published["max_position_embeddings"]
