"""A model is served in the dtype that its config.json names."""

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.cluster.served_engines import make_served_spec
from mcore_rl.config import ServedModelConfig
from mcore_rl.rollout.served_models import SERVED_DTYPES, check_served_path, find_dtype
from tests.support.engine_keys import KEYS


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "float32"}, "float32"),
        ({"torch_dtype": "float32"}, "float32"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "torch.float32"}, "float32"),
        ({"dtype": "half"}, "float16"),
        ({"text_config": {"dtype": "float32"}}, "float32"),
        ({"dtype": "bfloat16", "text_config": {"hidden_size": 8}}, "bfloat16"),
    ],
)
def test_auto_is_the_dtype_of_config_json(
    config: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    assert find_dtype("auto", write(tmp_path, config), "--dtype") == dtype


@pytest.mark.parametrize("dtype", SERVED_DTYPES)
def test_a_dtype_that_is_given_counts(dtype: str, tmp_path: Path) -> None:
    assert find_dtype(dtype, write(tmp_path, {"dtype": "float32"}), "--dtype") == dtype


@pytest.mark.parametrize(
    ("config", "named"), [({}, "None"), ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn")]
)
def test_a_config_that_names_none_is_refused(
    config: dict[str, Any], named: str, tmp_path: Path
) -> None:
    message = rf"^--dtype=auto: .*config.json names the dtype {named}; set --dtype to one of"
    with pytest.raises(ValueError, match=message):
        find_dtype("auto", write(tmp_path, config), "--dtype")


@pytest.mark.parametrize("role", ["judge", "reward_model", "teacher"])
def test_engines_of_each_role_never_get_auto(role: str, tmp_path: Path) -> None:
    model = ServedModelConfig(path=str(write(tmp_path, {"dtype": "float32"})), dtype="auto")
    spec = make_served_spec(role, model, tmp_path / "log", KEYS, can_release_memory=False)
    assert spec.dtype == "float32"


def test_a_role_without_a_dtype_is_refused_before_engines_start(tmp_path: Path) -> None:
    model = ServedModelConfig(path=str(write(tmp_path, {})), dtype="auto")
    with pytest.raises(ValueError, match=r"^judge\.dtype=auto: .* set judge\.dtype to one of"):
        check_served_path("judge", model)
