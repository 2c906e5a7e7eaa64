"""The whole quickstart with Muon in the place of Adam."""

from pathlib import Path

import pytest

from mcore_rl.tasks.arithmetic import prepare_arithmetic
from tests.support.runs import train_after_sft

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]
MUON = ("sft.optimizer.name=muon", "train.optimizer.name=muon")


def test_muon_takes_the_quickstart_above_95_percent(tmp_path: Path) -> None:
    prepare_arithmetic(tmp_path / "data")
    summary = train_after_sft("tiny_moe_grpo", tmp_path / "data", tmp_path, *MUON)
    assert summary["warm_start_accuracy"] < 0.5, "demonstrations alone should not teach the task"
    assert summary["final_accuracy"] > 0.95, summary
