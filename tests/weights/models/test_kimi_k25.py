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
from mcore_rl.weights.models.deepseek_kimi import DEEPSEEK_V3, KIMI_K25
from mcore_rl.weights.models.settings import drop_quantization
from tests.support.kimi_k25_published import CONFIG, GIB, NUM_TENSORS, list_tensors
from tests.support.policy import ROOT
from tests.support.tiny_kimi_k25 import write_kimi_k25_model


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
    assert not KIMI_K25.has_tower
    config = read_hf_config(write_kimi_k25_model(tmp_path / "hf"))
    assert "quantization_config" not in json.dumps(config)


def test_parts_that_see_images_lie_beside_the_model() -> None:
    config = with_text_settings(CONFIG)
    for name in ("vision_tower.patch_embed.proj.weight", "mm_projector.proj.0.bias"):
        assert KIMI_K25.is_carried(config, name)
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
    ],
)
def test_other_settings_are_refused(change: dict[str, Any], message: str) -> None:
    config = drop_quantization({**with_text_settings(CONFIG), **change})
    for key in [key for key, value in change.items() if value is None]:
        del config[key]
    with pytest.raises(ValueError, match=message):
        refuse_unsupported(config)


def test_the_recipes_model_is_the_published_language_model() -> None:
    config = json.loads((ROOT / "recipes/model/kimi_k25/config.json").read_text())
    published = with_text_settings(CONFIG)
    assert DEEPSEEK_V3.options(config) == KIMI_K25.options(published)
    shapes = {f"language_model.{name}": shape for name, shape in DEEPSEEK_V3.shapes(config).items()}
    assert shapes == KIMI_K25.shapes(published)
    assert config["max_position_embeddings"] == published["max_position_embeddings"]
