"""Rows of a run folder: what is read, what is refused, which samples are shown."""

from pathlib import Path
from typing import Any

import pytest

from mcore_rl.logs.rows import RowFile
from mcore_rl.logs.run_report import load_last_samples, load_metrics, pick_samples, select_series


def write(path: Path, *rows: dict[str, Any]) -> None:
    file = RowFile(path, None)
    file.write(*rows)
    file.close()


def sample(step: int, split: str, prompt_index: int, response: str = "") -> dict[str, Any]:
    return {"step": step, "split": split, "prompt_index": prompt_index, "response": response}


def test_metrics_need_a_completed_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no metrics.jsonl; give the run.dir"):
        load_metrics(tmp_path)
    write(tmp_path / "metrics.jsonl", {"step": 0, "eval/greedy_accuracy": 0.5})
    with pytest.raises(ValueError, match="no training step was completed"):
        load_metrics(tmp_path)
    rows = [{"step": 1, "reward/mean": 0.5}]
    write(tmp_path / "metrics.jsonl", *rows)
    assert load_metrics(tmp_path) == rows


def test_numbers_that_nobody_wants_are_left_out_of_all_segments(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "metrics.jsonl", None, rotate_bytes=50)
    for step in range(1, 8):
        file.write({"step": step, "reward/mean": 0.5, "other": 1.0})
    file.close()
    assert (tmp_path / "metrics.000002.jsonl").exists()
    assert load_metrics(tmp_path, lambda name: name == "reward/mean") == [
        {"step": step, "reward/mean": 0.5} for step in range(1, 8)
    ]


def test_samples_may_be_missing(tmp_path: Path) -> None:
    assert load_last_samples(tmp_path) == []
    write(tmp_path / "samples.jsonl", sample(1, "train", 0, "a\u2028b"))
    assert load_last_samples(tmp_path) == [sample(1, "train", 0, "a\u2028b")]


def test_samples_of_the_last_step_are_read_wherever_they_lie(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "samples.jsonl", None, rotate_bytes=50)
    for step in (1, 2):
        for prompt_index in range(3):
            file.write(sample(step, "train", prompt_index))
    file.close()
    assert load_last_samples(tmp_path) == [sample(2, "train", i) for i in range(3)]


def test_a_series_leaves_out_what_is_not_finite() -> None:
    rows = [{"step": 1, "a": 0.5}, {"step": 2, "a": None}, {"step": 3}, {"step": 4, "a": 0.0}]
    assert select_series(rows, "a") == [(1, 0.5), (4, 0.0)]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], []),
        ([sample(2, "train", 1)], [(2, "train", 1)]),
        ([sample(2, "train", 1), sample(2, "eval", 5)], [(2, "eval", 5)]),
        ([sample(2, "train", i // 2) for i in range(9)], [(2, "train", i) for i in range(3)]),
    ],
)
def test_samples_of_a_step_are_shown_one_per_prompt(
    rows: list[dict[str, Any]], expected: list[tuple[int, str, int]]
) -> None:
    picked = pick_samples(rows)
    assert [(row["step"], row["split"], row["prompt_index"]) for row in picked] == expected
