"""Loads the rows of metrics and samples from a run folder."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_rl.logs.rows import has_rows, iter_rows, iter_rows_backward

Row = Mapping[str, Any]
"""One line of metrics.jsonl or samples.jsonl (logs/names.py)."""

NUM_SAMPLES_SHOWN = 3


def load_metrics(run_dir: Path, is_wanted: Callable[[str], bool] = lambda name: True) -> list[Row]:
    """Return the rows of metrics.jsonl, of each its step and the numbers whose names are wanted.

    Raises ValueError if no training step was completed.
    """
    path = run_dir / "metrics.jsonl"
    if not has_rows(path):
        raise ValueError(
            f"{run_dir}: no metrics.jsonl; give the run.dir of an `mcore-rl train` run"
        )
    rows: list[Row] = []
    has_step = False
    for row in iter_rows(path):
        has_step = has_step or row.get("reward/mean") is not None
        rows.append({n: value for n, value in row.items() if n == "step" or is_wanted(n)})
    if not has_step:
        raise ValueError(f"{path}: no row has reward/mean; no training step was completed")
    return rows


def load_last_samples(run_dir: Path) -> list[Row]:
    """Return the rows of the last step in samples.jsonl, or none if there is no such file."""
    rows: list[Row] = []
    for row in iter_rows_backward(run_dir / "samples.jsonl"):
        if rows and row["step"] != rows[-1]["step"]:
            break
        rows.append(row)
    return rows[::-1]


def series(rows: Sequence[Row], name: str) -> list[tuple[int, float]]:
    """Return (step, value) of each row that has a finite value for `name`."""
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]


def pick_samples(rows: Sequence[Row]) -> list[Row]:
    """Return a few samples of a step, one per prompt, held-out ones if there are any."""
    held_out = [row for row in rows if row["split"] == "eval"]
    by_prompt: dict[int, Row] = {}
    for row in held_out or rows:
        by_prompt.setdefault(row["prompt_index"], row)
    return list(by_prompt.values())[:NUM_SAMPLES_SHOWN]
