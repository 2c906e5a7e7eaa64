"""Checkpoints that `mcore-rl serve` takes, and those that it refuses."""

import json
import shutil
from pathlib import Path

import pytest

from mcore_rl.cli import main
from mcore_rl.run.serving import find_model, make_serving_keys, refuse_code
from mcore_rl.tasks.arithmetic import make_tokenizer
from tests.data.test_tokenizer import write_tokenizer_that_is_code


def refuse(*_: Path) -> None:
    raise AssertionError("nothing is to be merged")


def test_a_huggingface_directory_is_served_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json does not exist"):
        find_model(tmp_path, None, refuse)
    shutil.copy("recipes/model/qwen3_30b_a3b/config.json", tmp_path)
    with pytest.raises(ValueError, match=r"has no tokenizer_config.json: chats need the model's"):
        find_model(tmp_path, None, refuse)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert find_model(tmp_path, None, refuse) == tmp_path


def test_serve_refuses_a_model_that_names_no_dtype(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads(Path("recipes/model/qwen3_30b_a3b/config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    log = tmp_path / "serve.log"
    assert main(["serve", str(tmp_path), "--log", str(log)]) == 2
    assert "--dtype=auto: " in capsys.readouterr().err
    assert not log.exists()


def test_code_beside_a_model_runs_only_if_it_is_trusted(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    refuse_code(tmp_path)
    write_tokenizer_that_is_code(tmp_path)
    with pytest.raises(ValueError, match=r"its tokenizer is Python code .* --trust-remote-code"):
        refuse_code(tmp_path)


def test_a_megatron_checkpoint_is_merged_once(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step_000010"
    checkpoint.mkdir()
    (checkpoint / ".metadata").write_text("")
    with pytest.raises(ValueError, match=r"is a Megatron checkpoint: give --source-hf"):
        find_model(checkpoint, None, refuse)

    def merge(source: Path, source_hf: Path, out: Path) -> str:
        out.mkdir()
        (out / "config.json").write_text("{}")
        return f"merged {source.name} with {source_hf.name}"

    merged = tmp_path / "step_000010_hf"
    assert find_model(checkpoint, tmp_path / "start", merge) == merged
    assert find_model(checkpoint, None, refuse) == merged


def test_a_key_file_is_needed_where_other_machines_reach_the_server(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_text("0123456789abcdef\n")
    for host in ("127.0.0.1", "0.0.0.0", "10.0.0.7"):
        keys = make_serving_keys(path, host)
        assert keys.user == "0123456789abcdef" and keys.admin not in ("", keys.user)
    assert make_serving_keys(None, "127.0.0.1").user == ""
    assert make_serving_keys(None, "localhost").admin
    for host in ("0.0.0.0", "10.0.0.7", "node3"):
        with pytest.raises(ValueError, match=f"--host={host}: .* give --key-file, or serve at"):
            make_serving_keys(None, host)
