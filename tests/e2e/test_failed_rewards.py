"""Rewards that fail in a whole run: their samples are left out, and an outage ends the run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.runs import Run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
REWARD = """
from itertools import count
calls = count()

def reward(*, data_source, solution_str, ground_truth, extra_info):
    number = next(calls)
    if number % 8 == 7 or number >= 32:
        raise ConnectionError(f"verifier is away, call {number}")
    return float(number % 2)
"""


def test_failed_rewards_cost_their_samples_until_there_are_too_many(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    """Two of the 16 calls of a step fail; from the third step on, all do."""
    path = tmp_path / "mine.py"
    path.write_text(REWARD)
    options = ["eval.data=[]", "checkpoint.export_hf=false", "algorithm.advantage=grpo"]
    run = start("train", f"reward.path={path}", "run.steps=4", *options)
    assert run.finish() == 1, run.tail()
    run.assert_nothing_left()
    message = (
        "step 3: 16 of 16 rewards failed, a share of 1 above reward.max_failed_share=0.25; the"
        " first: 'ConnectionError: verifier is away, call 32'. Mend what failed"
    )
    assert message in run.tail()
    steps = [row for row in run.metrics() if "loss/total" in row]
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert (row["rollout/samples"], row["reward/errors"]) == (14, 2)
        assert row["reward/failed_share"] == 2 / 16 and row["reward/mean"] == pytest.approx(6 / 14)
    samples = [json.loads(line) for line in (run.run_dir / "samples.jsonl").open()]
    assert len(samples) == 32
    failed = [row for row in samples if "reward_error" in row]
    assert [row["reward"] for row in failed] == [None] * 4
    assert {row["reward_error"] for row in failed} == {
        f"ConnectionError: verifier is away, call {number}" for number in (7, 15, 23, 31)
    }
