"""The countdown recipe end to end: exploration finds what no demonstration shows."""

import json
from pathlib import Path

import pytest

from mcore_rl.tasks.countdown import prepare_countdown
from tests.support.runs import Run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_exploration_gains_thirty_points_on_held_out_problems(tmp_path: Path) -> None:
    data = tmp_path / "data"
    prepare_countdown(data)
    common = [
        "recipe=tiny_moe_countdown",
        f"data.train=[{data / 'train.parquet'}]",
        f"eval.data=[{data / 'heldout.parquet'}]",
        f"sft.data=[{data / 'sft.parquet'}]",
    ]
    imitation = [f"model.path={data / 'model'}", "model.init=random"]
    warm_start = Run(["sft", *common, *imitation], tmp_path / "warm_start")
    assert warm_start.finish(600) == 0, warm_start.tail()
    run = Run(["train", *common, f"model.path={tmp_path / 'warm_start' / 'hf'}"], tmp_path / "run")
    assert run.finish(900) == 0, run.tail()
    run.assert_nothing_left()

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    before, after = summary["warm_start_accuracy"], summary["final_accuracy"]
    assert 0.2 < before < 0.45, "imitation alone should solve as many as luck does"
    assert after - before >= 0.30, summary
