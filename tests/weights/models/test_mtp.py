"""Trained layers for multi-token prediction in the tables, against published configurations."""

import json
import re
from math import prod
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.weights.hf.config import (
    find_mtp_problem,
    read_hf_config,
    with_trained_mtp,
    without_trained_mtp,
)
from mcore_rl.weights.layouts.training import LocalPart, make_training_shards
from mcore_rl.weights.models import family_of, hf_tensor_shapes
from tests.support.tiny_models import write_model


def config_of(model: str) -> dict[str, Any]:
    return json.loads(Path(f"recipes/model/{model}/config.json").read_text())


def test_deepseek_v3_has_the_published_number_of_parameters_more() -> None:
    """DeepSeek's README_WEIGHTS.md: 11.5 billion that are not the model's, and two copies."""
    plain = config_of("deepseek_v3")
    trained = with_trained_mtp(plain)
    shapes = hf_tensor_shapes(trained)
    more = {name: shapes[name] for name in shapes.keys() - hf_tensor_shapes(plain).keys()}
    assert all(name.startswith("model.layers.61.") for name in more)
    assert more["model.layers.61.eh_proj.weight"] == (7168, 2 * 7168)
    assert more["model.layers.61.shared_head.norm.weight"] == (7168,)
    assert more["model.layers.61.mlp.experts.255.down_proj.weight"] == (7168, 2048)
    copies = family_of(trained).copies(trained)
    assert copies == {
        "model.layers.61.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.61.shared_head.head.weight": "lm_head.weight",
    }
    assert sum(map(prod, more.values())) / 1e9 == pytest.approx(11.5, abs=0.15)
    assert without_trained_mtp(trained) == plain


@pytest.mark.parametrize("model", ["deepseek_v3", "glm_4_5_air"])
def test_of_trained_layers_only_the_copies_are_carried(model: str) -> None:
    plain = config_of(model)
    trained, family = with_trained_mtp(plain), family_of(plain)
    number = plain["num_hidden_layers"]
    for name in ("eh_proj.weight", "mlp.experts.7.up_proj.weight"):
        assert family.is_carried(plain, f"model.layers.{number}.{name}")
        assert not family.is_carried(trained, f"model.layers.{number}.{name}")
    for name in ("embed_tokens.weight", "shared_head.head.weight"):
        assert family.is_carried(trained, f"model.layers.{number}.{name}")
    assert not family.copies(plain)


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_the_layer_of_qwen_has_names_of_its_own(tmp_path: Path, kind: str) -> None:
    """It has softmax attention as each fourth layer of the model, and what follows it there."""
    plain = read_hf_config(write_model(kind, tmp_path))
    trained, family = with_trained_mtp(plain), family_of(plain)
    shapes = hf_tensor_shapes(trained)
    more = {name: shapes[name] for name in shapes.keys() - hf_tensor_shapes(plain).keys()}
    last = {name: shape for name, shape in shapes.items() if name.startswith("model.layers.3.")}
    own = {name: more.pop(name) for name in list(more) if not name.startswith("mtp.layers.0.")}
    assert more == {name.replace("model.layers.3.", "mtp.layers.0."): last[name] for name in last}
    hidden = plain["hidden_size"]
    assert own == {
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.norm.weight": (hidden,),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
    }
    assert family.is_carried(plain, "mtp.fc.weight")
    assert not family.is_carried(trained, "mtp.fc.weight")
    assert not family.is_carried(plain | {"mtp_num_hidden_layers": 0}, "mtp.fc.weight")


def test_models_that_see_images_train_no_such_layer() -> None:
    config = config_of("qwen3_5_35b_a3b")
    problem = "has no layers for multi-token prediction that can be trained"
    assert find_mtp_problem({**config, **config["text_config"]}) == problem


@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        ("qwen3_next", {"mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers above 0"),
        ("qwen3_5", {"mtp_num_hidden_layers": 2}, "has 2 layers for multi-token prediction, which"),
        ("qwen3_moe", {}, "has no layers for multi-token prediction that can be trained"),
        ("deepseek_v3", {}, "has no layers for multi-token prediction: config.json has no"),
        (
            "deepseek_v3",
            {"num_nextn_predict_layers": 1, "first_k_dense_replace": 4},
            "ends with a layer of another kind",
        ),
    ],
)
def test_models_without_such_layers_say_why(
    tmp_path: Path, kind: str, changes: dict[str, Any], problem: str
) -> None:
    config = read_hf_config(write_model(kind, tmp_path, **changes))
    assert problem in find_mtp_problem(config)
    with pytest.raises(ValueError, match=re.escape(problem)):
        with_trained_mtp(config)


def test_a_layer_beyond_those_of_config_json_is_an_error() -> None:
    plain = config_of("deepseek_v3")
    keys = {number: f"mtp.layers.{number}.enorm.weight" for number in (0, 1)}
    parts = {n: LocalPart(key, (7168,), (0,), (7168,), "x", "bfloat16") for n, key in keys.items()}
    family, trained = family_of(plain), with_trained_mtp(plain)
    [shard] = make_training_shards([parts[0]], family, trained)
    assert shard.box.name == "model.layers.61.enorm.weight"
    for config, part in ((trained, parts[1]), (plain, parts[0])):
        with pytest.raises(ValueError, match=r"mtp.layers.\d.enorm.weight: .* layers for multi"):
            make_training_shards([part], family, config)
