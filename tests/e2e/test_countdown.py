"""The countdown recipe end to end: exploration finds what no demonstration shows."""

from pathlib import Path

import pytest

from mcore_rl.tasks.countdown import prepare_countdown
from tests.support.runs import train_after_sft

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_exploration_gains_thirty_points_on_held_out_problems(tmp_path: Path) -> None:
    prepare_countdown(tmp_path / "data")
    summary = train_after_sft("tiny_moe_countdown", tmp_path / "data", tmp_path)
    before, after = summary["warm_start_accuracy"], summary["final_accuracy"]
    assert 0.2 < before < 0.45, "imitation alone should solve as many as luck does"
    assert after - before >= 0.30, summary
