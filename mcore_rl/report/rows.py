"""Loads the rows of metrics and samples from a run folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_rl.metrics.rows import read_rows

Row = Mapping[str, Any]
"""One line of metrics.jsonl or samples.jsonl (metrics/names.py)."""

NUM_SAMPLES_SHOWN = 3


def load_metrics(run_dir: Path) -> list[Row]:
    """Return the rows of metrics.jsonl. Raises ValueError if no training step was completed."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        raise ValueError(
            f"{run_dir}: no metrics.jsonl; give the run.dir of an `mcore-rl train` run"
        )
    rows: list[Row] = [*read_rows(path)]
    if not series(rows, "reward/mean"):
        raise ValueError(f"{path}: no row has reward/mean; no training step was completed")
    return rows


def load_samples(run_dir: Path) -> list[Row]:
    """Return the rows of samples.jsonl, or none if there is no such file."""
    path = run_dir / "samples.jsonl"
    return [*read_rows(path)] if path.exists() else []


def series(rows: Sequence[Row], name: str) -> list[tuple[int, float]]:
    """Return (step, value) of each row that has a finite value for `name`."""
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]


def pick_samples(rows: Sequence[Row]) -> list[Row]:
    """Return a few samples of the last step, one per prompt, held-out ones if there are any."""
    last_step = max((row["step"] for row in rows), default=0)
    last = [row for row in rows if row["step"] == last_step]
    held_out = [row for row in last if row["split"] == "eval"]
    by_prompt: dict[int, Row] = {}
    for row in held_out or last:
        by_prompt.setdefault(row["prompt_index"], row)
    return list(by_prompt.values())[:NUM_SAMPLES_SHOWN]
