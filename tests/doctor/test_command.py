"""`mcore-rl doctor`: wrong input is refused before any check runs."""

from pathlib import Path

import pytest

from mcore_rl.cli import main as mcore_rl
from mcore_rl.device import has_cuda
from mcore_rl.doctor.command import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stages", "nope"], "--stages=nope: no stage 'nope'; there are sync, "),
        (["--wheels", "/nowhere"], "--wheels=/nowhere: there is no .whl file"),
    ],
)
def test_wrong_arguments_are_one_line_and_status_2(
    arguments: list[str], message: str, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert mcore_rl(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err
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
    monkeypatch.setattr("mcore_rl.doctor.runner.run_stages", lambda stages, logs: False)
    assert mcore_rl(["doctor", "--logs", str(tmp_path)]) == 1
    assert f"checks failed; what they printed lies in {tmp_path}" in capsys.readouterr().err
