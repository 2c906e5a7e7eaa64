"""A folder is opened by its kind; what is not a checkpoint is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checkpoint_tools.cli import main
from checkpoint_tools.listing import encode_listing, print_listing
from checkpoint_tools.opening import open_checkpoint
from tests.support.megatron_layout import model_config


def test_a_huggingface_directory_is_opened_and_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"a": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    listing = encode_listing(checkpoint)
    assert (listing["kind"], listing["num_tensors"], listing["bytes"]) == ("hf", 1, 24)
    assert listing["tensors"]["a"] == {
        "dtype": "float32",
        "shape": [2, 3],
        "bytes": 24,
        "chunks": 1,
        "files": ["model.safetensors"],
    }
    print_listing(checkpoint)
    text = capsys.readouterr().out
    assert "a       float32  2x3    1       24 B" in text
    assert "checksums: none" in text


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is not a folder"):
        open_checkpoint(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="it is not a checkpoint"):
        open_checkpoint(tmp_path / "empty")
    (tmp_path / "empty" / ".metadata").write_bytes(b"")
    with pytest.raises(ValueError, match="is not a complete Megatron distributed checkpoint"):
        open_checkpoint(tmp_path / "empty")


@pytest.mark.parametrize("command", ["inspect", "verify", "to-hf"])
def test_a_checkpoint_in_the_legacy_format_is_refused_with_the_remedy(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in ("iter_0000050", "iter_0000100"):
        for rank in ("mp_rank_00_000", "mp_rank_01_000"):
            (tmp_path / step / rank).mkdir(parents=True)
            torch.save({"model": {}}, tmp_path / step / rank / "model_optim_rng.pt")
    more = [str(tmp_path / "out"), "--source-hf", str(tmp_path)] if command == "to-hf" else []
    (tmp_path / "config.json").write_text(json.dumps(model_config()))
    assert main([command, str(tmp_path / "iter_0000100"), *more]) == 2
    error = capsys.readouterr().err
    assert "iter_0000100 is in Megatron-LM's legacy format torch" in error
    assert "--ckpt-convert-format torch_dist --ckpt-convert-save" in error
    assert main([command, str(tmp_path), *more]) == 2
    assert f"name the folder of one, such as {tmp_path}/iter_0000100" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "verify", "from-hf", "to-fp8", "dequantize"])
def test_a_name_of_the_hub_is_refused_with_the_command_that_downloads_it(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    writes = command not in ("inspect", "verify")
    name = "Qwen/Qwen3-0.6B"
    assert main([command, name, *([str(tmp_path / "out")] if writes else [])]) == 2
    error = capsys.readouterr().err
    remedy = f"to download a model of the hub: hf download {name} --local-dir <directory>"
    assert error.endswith(f"{remedy}\n")
    assert main(["inspect", "a/b/c"]) == 2
    assert "hf download" not in capsys.readouterr().err
