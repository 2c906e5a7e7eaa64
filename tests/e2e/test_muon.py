"""The whole quickstart with Muon in the place of Adam."""

import json
from pathlib import Path

import pytest

from mcore_rl.tasks.arithmetic import prepare_arithmetic
from tests.support.runs import Run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_muon_takes_the_quickstart_above_95_percent(tmp_path: Path) -> None:
    data = tmp_path / "data"
    prepare_arithmetic(data)
    common = [
        "recipe=tiny_moe_grpo",
        f"data.train=[{data / 'train.parquet'}]",
        f"eval.data=[{data / 'heldout.parquet'}]",
        f"sft.data=[{data / 'sft.parquet'}]",
        "sft.optimizer.name=muon",
        "train.optimizer.name=muon",
    ]
    imitation = [f"model.path={data / 'model'}", "model.init=random"]
    warm_start = Run(["sft", *common, *imitation], tmp_path / "warm_start")
    assert warm_start.finish(600) == 0, warm_start.tail()
    run = Run(["train", *common, f"model.path={tmp_path / 'warm_start' / 'hf'}"], tmp_path / "run")
    assert run.finish(900) == 0, run.tail()
    run.assert_nothing_left()

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["warm_start_accuracy"] < 0.5, "demonstrations alone should not teach the task"
    assert summary["final_accuracy"] > 0.95, summary
