"""Conversions that are killed in the middle, and what the same command does afterwards."""

import errno
import itertools
import multiprocessing as mp
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from checkpoint_tools.cli import main
from checkpoint_tools.staging import JOURNAL, PARTIAL, StagedOutput
from mcore_rl.weights.hf.checksums import MANIFEST
from tests.support.tiny_models import write_model

UNITS_BEFORE_THE_KILL = 4


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough for a dozen units of work."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": 1000}
    return write_model("llama", tmp_path_factory.mktemp("source") / "hf", **sizes)


def convert_and_die(arguments: list[str]) -> None:
    """Run a command that kills its own process (SIGKILL) after some units, but not its workers."""
    finish = StagedOutput.finish

    def finish_some(self: StagedOutput, unit: Any, done: Any) -> None:
        finish(self, unit, done)
        if len(self.done) == UNITS_BEFORE_THE_KILL:
            os.kill(os.getpid(), signal.SIGKILL)

    StagedOutput.finish = finish_some
    main(arguments)


@pytest.fixture(scope="module")
def killed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a command that was killed: only its partial folder is there."""
    return kill_in_the_middle("from-hf", source, tmp_path_factory.mktemp("killed") / "out")


def kill_in_the_middle(command: str, source: Path, out: Path) -> Path:
    process = mp.get_context("fork").Process(
        target=convert_and_die, args=([command, str(source), str(out), "--workers", "2"],)
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert not out.exists()
    assert out.with_name(out.name + PARTIAL).is_dir()
    _wait_for_workers(out.with_name(out.name + PARTIAL) / JOURNAL)
    return out


def _wait_for_workers(journal: Path) -> None:
    """The killed command's workers, which inherited the journal, end by themselves."""
    deadline = time.monotonic() + 10.0
    while left := [process.pid for process in psutil.process_iter() if _has_open(process, journal)]:
        assert time.monotonic() < deadline, f"workers {left} live on"
        time.sleep(0.1)


def _has_open(process: psutil.Process, path: Path) -> bool:
    try:
        return any(file.path == str(path) for file in process.open_files())
    except psutil.Error:
        return False


def test_the_same_command_goes_on_and_makes_the_same(
    source: Path, killed: Path, tmp_path: Path, capsys: Any
) -> None:
    goes_on_and_makes_the_same("from-hf", source, killed, tmp_path, capsys)


def goes_on_and_makes_the_same(
    command: str, source: Path, killed: Path, tmp_path: Path, capsys: Any
) -> None:
    assert main([command, str(source), str(tmp_path / "whole"), "--workers", "1"]) == 0
    capsys.readouterr()
    assert main([command, str(source), str(killed), "--workers", "2"]) == 0
    assert "kept from an earlier run" in capsys.readouterr().out
    assert not killed.with_name(killed.name + PARTIAL).exists()
    assert sorted(p.name for p in killed.iterdir()) == sorted(
        p.name for p in (tmp_path / "whole").iterdir()
    )
    for path in killed.iterdir():
        assert path.read_bytes() == (tmp_path / "whole" / path.name).read_bytes(), path.name


def test_weights_that_are_dequantized_go_on_as_well(
    source: Path, tmp_path: Path, capsys: Any
) -> None:
    fp8 = tmp_path / "fp8"
    assert main(["to-fp8", str(source), str(fp8), "--workers", "1"]) == 0
    killed = kill_in_the_middle("dequantize", fp8, tmp_path / "out")
    goes_on_and_makes_the_same("dequantize", fp8, killed, tmp_path, capsys)


def test_units_that_were_damaged_since_are_done_again(
    source: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    process = mp.get_context("fork").Process(
        target=convert_and_die, args=(["from-hf", str(source), str(out), "--workers", "1"],)
    )
    process.start()
    process.join(60)
    partial = out.with_name(out.name + PARTIAL)
    with (partial / "__0_0.distcp").open("r+b") as file:
        file.seek(5000)
        file.write(bytes(100))
    with (partial / JOURNAL).open("ab") as journal:
        journal.write(b"[7, [[[0, ")  # torn by the kill
    assert main(["from-hf", str(source), str(out), "--workers", "1"]) == 0
    assert main(["verify", str(out), str(source), "--workers", "1"]) == 0
    assert main(["verify", str(out), "--workers", "1"]) == 0


def test_a_source_that_changed_since_is_begun_anew(
    source: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    process = mp.get_context("fork").Process(
        target=convert_and_die, args=(["from-hf", str(source), str(out), "--workers", "1"],)
    )
    process.start()
    process.join(60)
    os.utime(source / "model.safetensors")
    capsys.readouterr()
    assert main(["from-hf", str(source), str(out), "--workers", "1"]) == 0
    assert "kept from" not in capsys.readouterr().out
    assert (out / MANIFEST).is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--memory-budget", "1MiB"],
            "--memory-budget leaves 1024 KiB for each worker, which needs 4 MiB",
        ),
        (["--memory-budget", "8MiB", "--workers", "4"], "leaves 2048 KiB for each worker"),
        (["--workers", "0"], "--workers=0: at least 1"),
    ],
)
def test_too_little_to_work_with_is_refused(
    source: Path, tmp_path: Path, capsys: Any, options: list[str], message: str
) -> None:
    workers = [] if "--workers" in options else ["--workers", "1"]
    assert main(["from-hf", str(source), str(tmp_path / "out"), *options, *workers]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_full_disk_is_one_line_and_the_same_command_goes_on(
    source: Path, tmp_path: Path, capsys: Any, monkeypatch: Any, num_workers: int
) -> None:
    out = tmp_path / "out"
    command = ["from-hf", str(source), str(out), "--workers", str(num_workers)]
    write = os.pwrite
    num_writes = itertools.count()

    def write_until_full(descriptor: int, data: Any, offset: int) -> int:
        if next(num_writes) >= 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write_until_full)
        assert main(command) == 1
    message = capsys.readouterr().err
    assert f"out{PARTIAL}/__0_0.distcp: no space left on device" in message
    assert message.count("\n") == 1 and "free" in message
    assert not out.exists()
    assert main(command) == 0
    assert "kept from an earlier run" in capsys.readouterr().out
    assert main(["verify", str(out), str(source), "--workers", "1"]) == 0
