"""The GPU checks by option: which checks, in what time; wrong input is refused."""

import argparse
import os
from pathlib import Path

import pytest

from mcore_rl.cli import main as mcore_rl
from mcore_rl.device import has_cuda
from mcore_rl.tools.doctor.command import add_gpu_checks, is_for_gpu_checks, main
from mcore_rl.tools.doctor.run_checks import SETTINGS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checks", "te:x"], "--checks=te:x: no check 'te:x'; there are sync:in place, "),
        (["--stages", "te", "--checks", "te:speed"], "--stages=te and --checks=te:speed: choose"),
        (["--stages=te", "--seconds=9"], "--seconds=9: no check fits; te:"),
        (
            ["--seconds=9"],
            "--seconds=9.0 is an option of the GPU checks: add --gpu, --stages or --checks",
        ),
        (
            ["--warm-start=x"],
            "--warm-start=x is an option of the GPU checks: add --gpu, --stages or --checks",
        ),
        (["--stages=run", "--warm-start=/x"], "--warm-start=/x is no folder: make warm-start"),
        (["--gpu", "--only", "ports"], "--gpu, --stages and --checks run the GPU checks, without"),
        (["--stages", "nope"], "--stages=nope: no stage 'nope'; there are sync, "),
        (
            ["--stages=sync", "run.steps=1"],
            "run.steps=1: the GPU checks take settings for the stage run",
        ),
    ],
)
def test_wrong_arguments_are_one_line_and_status_2(
    arguments: list[str], message: str, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv(SETTINGS, "[]")  # restored after the test
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"mcore-rl doctor: {message}")


@pytest.mark.skipif(has_cuda(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_not_checked(capsys) -> None:
    assert mcore_rl(["doctor", "--gpu"]) == 2
    assert "--gpu: torch sees no GPU here" in capsys.readouterr().err


def test_a_failed_check_is_status_1(
    capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(
        "mcore_rl.tools.doctor.runner.run_stages", lambda stages, logs, seconds: False
    )
    assert mcore_rl(["doctor", "--stages", "all", "--logs", str(tmp_path)]) == 1
    assert f"checks failed; what they printed lies in {tmp_path}" in capsys.readouterr().err


def test_checks_on_a_gpu_keep_what_compilers_made_in_the_folder_that_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    folders |= {"SGLANG_CACHE_DIR": "sglang", "CUDA_CACHE_PATH": "driver"}
    for name in folders:
        monkeypatch.setenv(name, "restored after the test")
        monkeypatch.delenv(name)
    monkeypatch.setattr("mcore_rl.device.has_cuda", lambda: True)
    monkeypatch.setattr(
        "mcore_rl.tools.doctor.runner.run_stages", lambda stages, logs, seconds: True
    )
    monkeypatch.setenv(SETTINGS, "[]")
    assert mcore_rl(["doctor", "--gpu", "--caches", str(tmp_path), "--logs", str(tmp_path)]) == 0
    for name, folder in folders.items():
        assert os.environ.get(name) == str(tmp_path / folder)


def test_the_list_of_checks_needs_no_gpu_and_starts_none(
    capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert mcore_rl(["doctor", "--list", "--gpu", "--checks", "te:speed,run:reward_rises"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[:2]] == ["te:speed", "run:reward rises"]
    assert lines[2] == "2 checks, at most 780 s"


@pytest.mark.parametrize("words", ["--gpu", "--stages te", "--checks te:speed", "--list"])
def test_the_kit_is_asked_for_by_any_option_that_chooses_checks(words: str) -> None:
    parser = argparse.ArgumentParser()
    add_gpu_checks(parser.add_argument_group())
    assert is_for_gpu_checks(parser.parse_args([*words.split(), "--seconds", "580"]))
    assert not is_for_gpu_checks(parser.parse_args(["--logs", "elsewhere"]))
