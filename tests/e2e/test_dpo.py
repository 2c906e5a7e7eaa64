"""Preferences end to end: a model's own responses become pairs, and DPO learns from them."""

import math
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.runs import Run

pytestmark = pytest.mark.e2e

REWARD = """
def reward(*, data_source, solution_str, ground_truth, extra_info):
    return len(set(solution_str.split()))
"""


@pytest.mark.slow
def test_pairs_of_own_responses_are_told_apart(start: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    # of a random model's responses only one in ten ends by itself, and others make no pairs
    options = ["rollout.samples_per_prompt=32", "dpo.prompts=48", "dpo.pairs_per_prompt=2"]
    made = start("pairs", f"reward.path={tmp_path / 'reward.py'}", *options)
    assert made.finish() == 0, made.tail()
    made.assert_nothing_left()
    files = [made.run_dir / "pairs" / f"{name}.parquet" for name in ("train", "heldout")]
    assert all(path.exists() for path in files), made.tail()
    for row in pq.read_table(files[0]).to_pylist():
        chosen, rejected = (
            len(set(row[name][0]["content"].split())) for name in ("chosen", "rejected")
        )
        assert chosen > rejected, row

    run = start(
        "dpo",
        f"dpo.data=[{files[0]}]",
        f"dpo.held_out=[{files[1]}]",
        "dpo.steps=5",
        "dpo.batch_size=40",
        "dpo.optimizer.lr=3e-4",
        "algorithm.preference.beta=0.5",
    )
    assert run.finish() == 0, run.tail()
    run.assert_nothing_left()
    steps = [line for line in run.metrics() if "preference/loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert steps[0]["preference/margin"] == 0 and steps[0]["loss/total"] == pytest.approx(
        math.log(2)
    )
    assert (
        steps[-1]["preference/margin"] > 0.02 and steps[-1]["loss/total"] < steps[0]["loss/total"]
    )
    assert all(line["ratio/token_max"] == pytest.approx(1, abs=1e-4) for line in steps)
    held_out = [line for line in run.metrics() if "eval/preference/accuracy" in line]
    assert [line["step"] for line in held_out] == [5]
    assert (run.run_dir / "hf" / "config.json").exists()
