"""A config.json is read as transformers reads it, or refused, with keys absent, null or twice."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError

from mcore_rl.train.transformer_config import rotary_options
from mcore_rl.weights.hf.config import read_hf_config
from mcore_rl.weights.models import LANGUAGE, family_of
from mcore_rl.weights.models.settings import read_rope
from tests.support.tiny_models import MODELS, SAVED_ELSEWHERE, SIZES

OWN = ("architectures", "model_type", "num_nextn_predict_layers")
"""Keys that name the model, and one of layers that transformers does not load either."""
UNREAD = ("first_k_dense_replace",)
"""Keys that SGLang needs, and that transformers reads of some families in no way."""
DEFAULT = {"rope_type": "default", "rope_theta": 500.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 700.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES: dict[str, dict[str, Any] | None] = {
    "none": None,
    "default": DEFAULT,
    "no_theta": {"rope_type": "default"},
    "yarn": YARN,
    "old_yarn": {"type": "yarn", **{k: v for k, v in YARN.items() if k != "rope_type"}},
    "yarn_and_type": {**YARN, "type": "default"},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def whole_config(kind: str) -> dict[str, Any]:
    """Return all settings of a model, none of which is what would follow from another."""
    name, settings = MODELS[kind]
    given = {**SIZES, **settings, "num_attention_heads": 2}
    config = getattr(transformers, name)(**given)
    name = name.replace("TextConfig", "Config").replace("Config", "ForCausalLM")
    elsewhere = SAVED_ELSEWHERE.get(kind, {})
    unread = {key: value for key, value in elsewhere.items() if key in UNREAD}
    whole = json.loads(config.to_json_string(use_diff=False))
    return {**unread, **whole, "architectures": [name]}


def read(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return all that a run takes from a config.json. Raises ValueError if it is refused."""
    (folder / "config.json").write_text(json.dumps(config))
    known = read_hf_config(folder)
    family = family_of(known)
    sizes = dict(family.sizes(known))
    rope = read_rope(known)
    return {
        "sizes": sizes,
        "options": family.options(known),
        "experts": [family.is_moe_layer(known, i) for i in range(sizes["layers"])],
        "rotary": rotary_options(known),
        "rope": {name: rope[name] for name in ("rope_type", "rope_theta")},
        "factor": rope.get("factor"),
        "is_tied": bool(known.get("tie_word_embeddings")),
    }


def complete(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json with every value that transformers reads from it."""
    made = transformers.AutoConfig.for_model(config["model_type"]).from_dict(config)
    return json.loads(made.to_json_string(use_diff=False))


def differences(config: dict[str, Any], folder: Path) -> str:
    """Return how we read a config.json otherwise than transformers; "" if alike or refused."""
    try:
        ours = read(config, folder)
    except ValueError:
        return ""
    try:
        whole = complete(json.loads(json.dumps(config)))
    except StrictDataclassError:  # transformers refuses it
        return ""
    theirs = read(whole, folder)
    return ", ".join(f"{k}: {ours[k]} != {theirs[k]}" for k in ours if ours[k] != theirs[k])


@pytest.mark.slow
@pytest.mark.parametrize("change", [lambda c, k: c.pop(k), lambda c, k: c.update({k: None})])
@pytest.mark.parametrize("kind", MODELS)
def test_a_key_that_is_absent_or_null_is_what_it_is_in_transformers(
    tmp_path: Path, kind: str, change: Callable[[dict[str, Any], str], object]
) -> None:
    whole = whole_config(kind)
    assert differences(whole, tmp_path) == ""
    read(whole, tmp_path)  # which is not refused
    found: dict[str, str] = {}
    for key in whole:
        if key in OWN:
            continue
        config = json.loads(json.dumps(whole))
        change(config, key)
        if text := differences(config, tmp_path):
            found[key] = text
    assert found == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_every_pair_of_old_and_new_rotary_keys_is_what_it_is_in_transformers(
    tmp_path: Path, kind: str
) -> None:
    whole = whole_config(kind)
    found: dict[tuple[str, str, str], str] = {}
    for new, old, theta in product(ROPES, ROPES, (None, 900.0)):
        config = {k: v for k, v in whole.items() if k not in ("rope_parameters", "rope_theta")}
        given = {
            "rope_parameters": ROPES[new],
            "rope_scaling": ROPES[old],
            "rope_theta": theta,
            "original_max_position_embeddings": theta and 32,
        }
        config |= {key: value for key, value in given.items() if value is not None}
        if text := differences(config, tmp_path):
            found[(new, old, str(theta))] = text
    assert found == {}


def test_yarn_in_the_old_key_beside_the_new_one_is_refused_where_it_is_not_supported(
    tmp_path: Path,
) -> None:
    config = {**whole_config("qwen3_moe"), "rope_parameters": DEFAULT, "rope_scaling": YARN}
    with pytest.raises(ValueError, match=r"rope_type='yarn' in .*: only 'default' is supported"):
        read(config, tmp_path)
    whole = whole_config("deepseek_v3")
    got = read({**whole, "rope_parameters": DEFAULT, "rope_scaling": YARN}, tmp_path)
    assert got["options"]["rotary_scaling_factor"] == 4.0
    assert got["rope"] == {"rope_type": "yarn", "rope_theta": 700.0}


def test_rotary_settings_by_kind_of_layer_are_refused(tmp_path: Path) -> None:
    nested = {"full_attention": DEFAULT, "sliding_attention": YARN}
    config = {**whole_config("gpt_oss"), "rope_parameters": nested}
    with pytest.raises(ValueError, match="differ by kind of layer: full_attention, sliding_att"):
        read(config, tmp_path)


@pytest.mark.parametrize("family", LANGUAGE, ids=lambda family: family.architecture)
def test_keys_with_defaults_of_a_family_are_required(tmp_path: Path, family: Any) -> None:
    kinds = {whole_config(kind)["architectures"][0]: kind for kind in MODELS}
    kind = kinds.get(family.architecture)
    if kind is None:
        # Its text_config is that of another family.
        assert family.architecture.endswith("ForConditionalGeneration")
        assert family.explicit
        return
    for key in family.explicit:
        config = whole_config(kind)
        del config[key]
        name = family.architecture
        lacks = f"config.json (lacks '{key}', for which {name}|of {name} lacks '{key}')"
        with pytest.raises(ValueError, match=lacks):
            read(config, tmp_path)
