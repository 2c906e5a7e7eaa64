"""config.json is read whole or refused with the file's name; sizes derived from it are right."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.slices.hf.config import (
    VOCAB_MULTIPLE,
    moe_layers,
    named_dtype,
    padded_vocab_size,
    parse_hf_config,
    read_hf_config,
)
from tests.support.megatron_layout import model_config


def write(folder: Path, text: str | bytes) -> Path:
    content = text.encode() if isinstance(text, str) else text
    (folder / "config.json").write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config.json is not JSON"),
        (b"\xff\xfe{}", r"config.json is not JSON"),
        ("[1]", r"config.json is not a JSON object: it is damaged"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_hf_config(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json does not exist: .* not a HuggingFace model"):
        parse_hf_config(tmp_path)


def test_any_model_is_parsed_but_only_supported_ones_are_read(tmp_path: Path) -> None:
    config = model_config(architectures=["NoSuchForCausalLM"])
    write(tmp_path, json.dumps(config))
    assert parse_hf_config(str(tmp_path)) == config
    with pytest.raises(ValueError, match="NoSuchForCausalLM"):
        read_hf_config(tmp_path)


def test_unsupported_settings_are_named_with_the_file(tmp_path: Path) -> None:
    write(tmp_path, json.dumps(model_config(hidden_act="gelu")))
    with pytest.raises(ValueError, match=r"hidden_act='gelu' in .*config.json: only 'silu'"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float32", "torch_dtype": "float16"}, "float32"),
        ({}, None),
    ],
)
def test_the_dtype_is_found_in_either_spelling(config: dict[str, str], dtype: str | None) -> None:
    assert named_dtype(config) == dtype


@given(st.integers(1, 300_000), st.integers(1, 64))
def test_the_padded_vocabulary_is_the_smallest_that_divides(vocab_size: int, tp: int) -> None:
    padded = padded_vocab_size({"vocab_size": vocab_size}, tp)
    assert padded >= vocab_size
    assert padded % tp == padded % VOCAB_MULTIPLE == 0
    if VOCAB_MULTIPLE % tp == 0:
        assert padded - vocab_size < VOCAB_MULTIPLE
        assert padded == padded_vocab_size({"vocab_size": vocab_size}, 1)


def test_layers_with_experts_are_ones() -> None:
    assert moe_layers(model_config()) == [1, 0, 1]
