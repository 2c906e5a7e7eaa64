"""config.json is read whole or refused with the file's name; sizes derived from it are right."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.weights.hf.config import (
    VOCAB_MULTIPLE,
    drop_absent_mtp,
    moe_layers,
    pad_vocab_size,
    parse_hf_config,
    read_hf_config,
    read_named_dtype,
    set_dtype,
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


def test_the_folder_of_a_run_and_a_checkpoint_are_not_models_but_lead_to_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "hf").mkdir()
    write(tmp_path / "hf", json.dumps(model_config()))
    with pytest.raises(ValueError, match=rf"; {tmp_path}/hf is one$"):
        parse_hf_config(tmp_path)
    checkpoint = tmp_path / "step_000001"
    checkpoint.mkdir()
    (checkpoint / ".metadata").touch()
    with pytest.raises(ValueError, match=r"; `mcore-rl-ckpt to-hf` makes one of a checkpoint$"):
        parse_hf_config(checkpoint)


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
    assert read_named_dtype(config) == dtype


@given(st.integers(1, 300_000), st.integers(1, 64))
def test_the_padded_vocabulary_is_the_smallest_that_divides(vocab_size: int, tp: int) -> None:
    padded = pad_vocab_size({"vocab_size": vocab_size}, tp)
    assert padded >= vocab_size
    assert padded % tp == padded % VOCAB_MULTIPLE == 0
    if VOCAB_MULTIPLE % tp == 0:
        assert padded - vocab_size < VOCAB_MULTIPLE
        assert padded == pad_vocab_size({"vocab_size": vocab_size}, 1)


def test_layers_with_experts_are_ones() -> None:
    assert moe_layers(model_config()) == [1, 0, 1]


def test_a_file_that_is_nested_deeply_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config\.json is not JSON: .* nested too deeply"):
        read_hf_config(tmp_path)


def test_all_keys_say_the_dtype_of_an_export() -> None:
    config = {
        "torch_dtype": "float32",
        "dtype": "float16",
        "text_config": {"dtype": "float32", "hidden_size": 8},
        "vision_config": {"torch_dtype": "float32"},
        "quantization_config": {"bits": 4},
    }
    assert set_dtype(config, "bfloat16") == {
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16", "hidden_size": 8},
        "vision_config": {"torch_dtype": "bfloat16"},
        "quantization_config": {"bits": 4},
    }
    assert set_dtype({"hidden_size": 8}, "float32") == {"dtype": "float32", "hidden_size": 8}
    assert config["dtype"] == "float16"


MTP = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["model.layers.1.w"], 0),
        (["model.layers.2.eh_proj.weight"], 1),
        (["model.language_model.layers.2.w"], 1),
        (["mtp.fc.weight"], 1),
        (["model.layers.3.w", "model.layers.20.w"], 0),
    ],
)
def test_layers_without_weights_are_not_promised(
    names: list[str], kept: int, capsys: pytest.CaptureFixture[str]
) -> None:
    made = drop_absent_mtp({**MTP, "text_config": dict(MTP)}, names)
    assert made["num_nextn_predict_layers"] == kept
    assert made["text_config"] == {**MTP, "num_nextn_predict_layers": kept}
    said = "the source has no weights of them: the result says num_nextn_predict_layers=0"
    assert (said in capsys.readouterr().out) == (kept == 0)
