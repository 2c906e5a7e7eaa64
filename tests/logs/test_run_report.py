"""The report of a run folder written by the logger: numbers, picture, table, samples, last line."""

import io
import json
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

from mcore_rl.logs.logger import MetricsLogger
from mcore_rl.logs.run_report import make_report
from mcore_rl.process.disk import DiskFullError
from mcore_rl.types.scores import Scores
from tests.support.samples import HeldSampleLog, make_sample


def write_run(run_dir: Path, with_evaluation: bool = True) -> None:
    with HeldSampleLog(run_dir, console=False) as log:
        if with_evaluation:
            log.log(0, {"eval/greedy_accuracy": 0.40, "eval/pass_at_4": 0.6})
            log.log_held(0, [make_sample(0, "7")], Scores([0.0]), split="eval")
        for step in (1, 2, 3):
            log.log(
                step,
                {
                    "reward/mean": step / 4,
                    "rollout/samples": 32.0,
                    "logprob_diff/mean": step * 1e-5,
                    "sync/seconds": (0.9, 0.2, 0.3)[step - 1],
                    "time/step": 2.0,
                },
            )
            log.log_held(step, [make_sample(9, "trained on")], Scores([1.0]))
        if with_evaluation:
            log.log(3, {"eval/greedy_accuracy": 0.85, "eval/pass_at_4": 0.9})
            held_out = [make_sample(i, f"final answer {i + 1}") for i in range(5)]
            log.log_held(3, held_out, Scores([1.0] * 5), split="eval")


def test_summary_table_samples_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "tiny"
    write_run(run_dir)
    summary = make_report(run_dir)
    assert summary == pytest.approx(
        {
            "warm_start_accuracy": 0.40,
            "final_accuracy": 0.85,
            "grpo_steps": 3,
            "train_seconds": 6.0,
            "step0_logprob_diff_mean": 1e-5,
            "samples_per_second": 16.0,
            "sync_seconds_median": 0.3,
        }
    )
    assert json.loads((run_dir / "summary.json").read_text()) == summary
    printed = capsys.readouterr().out
    for text in (
        "40.0%",
        "85.0%",
        "+45.0 points",
        "final answer 1",
        "final answer 2",
        "final answer 3",
    ):
        assert text in printed, text
    assert "final answer 4" not in printed and "trained on" not in printed
    assert printed.splitlines()[-1] == f"run folder: {run_dir}"
    picture = imread(run_dir / "reward_curve.png")
    assert picture.shape[:2] == (960, 1200)
    assert (picture[..., :3].min(axis=-1) < 0.9).mean() > 0.005, "the picture is blank"


def test_a_run_without_evaluation_is_reported_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, with_evaluation=False)
    summary = make_report(tmp_path)
    assert summary["warm_start_accuracy"] is None and summary["final_accuracy"] is None
    assert "trained on" in capsys.readouterr().out


def test_what_is_no_training_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no metrics.jsonl; give the run.dir"):
        make_report(tmp_path)
    with MetricsLogger(tmp_path, console=False) as log:
        log.log(0, {"eval/greedy_accuracy": 0.5})
    with pytest.raises(ValueError, match="no training step was completed"):
        make_report(tmp_path)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_samples_that_a_terminal_cannot_print_are_escaped(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, with_evaluation=False)
    with HeldSampleLog(tmp_path, last_step=3, console=False) as log:
        log.log_held(3, [make_sample(1, "a\u2028b \ud83d naïve")], Scores([1.0]))
    printed = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", printed)
    make_report(tmp_path)
    text = printed.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    assert "\\ud83d" in text and ("naïve" in text or "na\\xefve" in text)


def test_a_folder_name_is_no_formula(tmp_path: Path) -> None:
    """matplotlib reads $...$ as a formula, and \\frac without arguments is an error."""
    run_dir = tmp_path / "run $\\frac$"
    write_run(run_dir)
    make_report(run_dir)
    assert (run_dir / "reward_curve.png").stat().st_size


def test_a_full_disk_is_said_as_such(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "summary.json").symlink_to("/dev/full")
    with pytest.raises(DiskFullError, match=r"cannot write .*summary.json: no space left"):
        make_report(tmp_path)
