"""A command says where it begins, and what the same command does after its end."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from mcore_rl.config import Config
from mcore_rl.config.recipe import load_recipe
from mcore_rl.logs.progress import tell_progress
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.process.disk import DiskFullError
from mcore_rl.process.signals import StoppedEarlyError
from mcore_rl.run.commands import run_train
from mcore_rl.run.kept_start import Origin
from mcore_rl.run.next_start import (
    describe_next_start,
    tell_if_finished,
    tell_next_start,
    tell_start,
)
from mcore_rl.run.process_setup import run_command
from tests.support.checkpoint_folders import write_checkpoint

GOES_ON = "the same command goes on after step 4 of 9"


def make_folder(path: Path, *steps: int) -> RunFolder:
    """Return a run's folder with checkpoints of these steps, and one of step 6 half written."""
    folder = RunFolder(path)
    for step in steps:
        write_checkpoint(folder.checkpoint(step))
    (folder.checkpoints / "step_000006.incomplete").mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("saved", "begun", "resume", "told"),
    [
        ((2, 4), (), True, GOES_ON),
        ((2, 4), (4,), True, GOES_ON),
        ((4,), (4, 6), True, f"{GOES_ON}; the checkpoint of step 6 was not completed"),
        (
            (4,),
            (),
            False,
            "the same command starts anew; without run.resume=false it goes on after step 4 of 9",
        ),
        ((), (), True, "the same command starts anew, as no checkpoint is complete"),
    ],
)
def test_each_end_says_what_the_same_command_does(
    tmp_path: Path, saved: tuple[int, ...], begun: tuple[int, ...], resume: bool, told: str
) -> None:
    folder = make_folder(tmp_path, *saved)
    folder.begun_steps += begun
    assert describe_next_start(folder, 9, resume) == told


def end_by(error: BaseException, folder: RunFolder) -> None:
    with tell_next_start(folder, 9, resume=True):
        raise error


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (RuntimeError("rank 1 died"), 1, ["mcore-rl: rank 1 died", GOES_ON]),
        (KeyboardInterrupt(), 130, ["mcore-rl: interrupted", GOES_ON]),
        (ValueError("run.steps=-1"), 2, ["mcore-rl: run.steps=-1"]),
        (StoppedEarlyError("stopped after step 4"), 75, ["mcore-rl: stopped after step 4"]),
    ],
)
def test_an_error_is_followed_by_what_is_next_unless_it_says_so_itself(
    tmp_path: Path,
    error: BaseException,
    status: int,
    said: list[str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = make_folder(tmp_path, 4)
    assert run_command(lambda: end_by(error, folder)) == status
    assert capfd.readouterr().err.splitlines() == said


def test_an_error_that_another_led_to_is_followed_by_what_is_next(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        try:
            end_by(OSError("quota"), make_folder(tmp_path, 4))
        except OSError as error:
            raise DiskFullError("the disk is full") from error

    assert run_command(run) == 1
    assert capfd.readouterr().err.splitlines() == ["mcore-rl: the disk is full", GOES_ON]


def test_a_signal_to_end_says_what_is_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with suppress(SystemExit):
        end_by(SystemExit(143), make_folder(tmp_path, 4))
    assert capsys.readouterr().out == f"{GOES_ON}\n"


@pytest.mark.parametrize(
    ("steps", "lines"),
    [
        ((), ["starts anew, as no checkpoint is complete; ignored, as their write was not"]),
        (
            (2, 4),
            ["goes on after step 4 of 9; ignored, as their write was not completed: step_0000"],
        ),
        ((4, 8), ["goes on after step 8 of 9"]),
    ],
)
def test_the_start_says_where_it_begins_and_what_it_ignores(
    tmp_path: Path, steps: tuple[int, ...], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path, *steps)
    with tell_progress():
        tell_start(folder, Origin(folder.newest_checkpoint()), 9)
    told = [line[len("00:00:00 ") :] for line in capsys.readouterr().out.splitlines()]
    assert [line[: len(begin)] for line, begin in zip(told, lines, strict=True)] == lines


def test_a_new_run_says_nothing_at_its_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tell_progress():
        tell_start(RunFolder(tmp_path), Origin(None), 9)
    assert capsys.readouterr().out == ""


def test_a_start_from_memory_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_folder(tmp_path, 4)
    with tell_progress():
        tell_start(folder, Origin(folder.newest_checkpoint(), {"step": 7}), 9)
    assert capsys.readouterr().out.endswith("goes on after step 7 of 9, which is in memory\n")


def make_config(folder: Path, *settings: str) -> Config:
    given = ["model.path=nowhere", f"run.dir={folder}", "run.steps=9", *settings]
    return load_recipe("tiny_moe_grpo", given)


def finish(folder: RunFolder) -> None:
    write_checkpoint(folder.checkpoint(9))
    folder.export.mkdir()
    with tell_next_start(folder, 9, resume=True):
        pass


def test_a_finished_run_is_told_as_such_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(RunFolder(tmp_path))
    run_train(make_config(tmp_path))  # the model is nowhere, so a start would fail
    told = capsys.readouterr().out
    assert told.startswith(f"{tmp_path} is complete at step 9: to go on, give a run.steps above 9;")


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        (lambda folder: None, ("run.steps=10",)),
        (lambda folder: None, ("run.resume=false",)),
        (lambda folder: folder.export.rmdir(), ()),
        (lambda folder: folder.checkpoint(9).rename(folder.path / "elsewhere"), ()),
        (lambda folder: (folder.path / "finished.json").unlink(), ()),
    ],
)
def test_a_run_that_lacks_something_is_not_finished(
    tmp_path: Path, change: Callable[[RunFolder], object], settings: tuple[str, ...]
) -> None:
    folder = RunFolder(tmp_path)
    finish(folder)
    assert tell_if_finished(make_config(tmp_path), "train")
    change(folder)
    assert not tell_if_finished(make_config(tmp_path, *settings), "train")


def test_a_run_that_starts_anew_is_not_finished_any_more(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    finish(folder)
    folder.prepare({}, resume=False)
    assert folder.read_finished_step() == 0
