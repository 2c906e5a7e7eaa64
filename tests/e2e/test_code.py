"""The recipes of programs end to end: repairs, and programs and unit tests that grow together."""

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.tasks.code import prepare_code
from tests.support.runs import Run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2700)]


def train(recipe: str, demonstrations: str, tmp_path: Path) -> tuple[Run, dict[str, Any]]:
    """Return the run after a warm start, and its summary."""
    data = tmp_path / "data"
    prepare_code(data)
    common = [
        f"recipe={recipe}",
        f"data.train=[{data / 'train.parquet'}]",
        f"eval.data=[{data / 'heldout.parquet'}]",
        f"sft.data=[{data / demonstrations}]",
    ]
    imitation = [f"model.path={data / 'model'}", "model.init=random"]
    warm_start = Run(["sft", *common, *imitation], tmp_path / "warm_start")
    assert warm_start.finish(900) == 0, warm_start.tail()
    run = Run(["train", *common, f"model.path={tmp_path / 'warm_start' / 'hf'}"], tmp_path / "run")
    assert run.finish(1500) == 0, run.tail()
    run.assert_nothing_left()
    return run, json.loads((tmp_path / "run" / "summary.json").read_text())


def test_held_out_programs_gain_thirty_points(tmp_path: Path) -> None:
    run, summary = train("tiny_agent_code", "sft.parquet", tmp_path)
    assert summary["final_accuracy"] - summary["warm_start_accuracy"] >= 0.30, summary
    steps = [line for line in run.metrics() if "episodes/attempts" in line]
    assert all(line["reward/errors"] == 0.0 for line in steps)


def test_programs_and_unit_tests_both_get_better(tmp_path: Path) -> None:
    run, summary = train("tiny_cure", "sft_roles.parquet", tmp_path)
    for part in ("program", "test"):
        rewards = [m[f"reward/part/{part}"] for m in run.metrics() if f"reward/part/{part}" in m]
        assert sum(rewards[-10:]) > sum(rewards[:10]), (part, rewards)
    assert summary["final_accuracy"] - summary["warm_start_accuracy"] >= 0.20, summary
