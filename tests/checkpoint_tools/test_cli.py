"""The command line: its commands, an old name, and exit statuses."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checkpoint_tools.cli import main, make_parser


def test_the_former_name_is_accepted_but_not_listed() -> None:
    for name in ("dequantize", "dequantise"):
        args = make_parser().parse_args([name, "in", "out"])
        assert (args.source_hf, args.out, args.dtype) == (Path("in"), Path("out"), "bfloat16")
    text = make_parser().format_help()
    assert "dequantize" in text and "dequantise" not in text


def test_wrong_input_is_status_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err == f"mcore-rl-ckpt: {tmp_path}/nowhere does not exist\n"


def test_checksums_are_written_and_verified(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "model.safetensors")
    verify = ["verify", str(tmp_path), "--workers", "1"]
    assert main(["checksums", str(tmp_path)]) == 0
    assert main(verify) == 0
    content = bytearray((tmp_path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(content)
    assert main(verify) == 2


def test_different_checkpoints_are_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("first", 1.0), ("second", 2.0)):
        (tmp_path / name).mkdir()
        save_file({"a": torch.full((4,), value)}, tmp_path / name / "model.safetensors")
    folders = [str(tmp_path / "first"), str(tmp_path / "second")]
    assert main(["verify", *folders, "--workers", "1"]) == 1
    text = capsys.readouterr().out
    assert "a: 4 of 4 elements differ, the first at [0]: 1.0 and 2.0; largest difference 1" in text
    assert "1 tensors differ: 1 tensors read" in text


def test_a_size_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["from-hf", str(tmp_path), str(tmp_path / "out"), "--memory-budget", "much"])
    assert "argument --memory-budget" in capsys.readouterr().err
