"""Sampling beside training, one step off or asynchronous: staleness, resume, lost engines."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.data.source import ShuffledStream
from tests.e2e.test_restart import DIED_FOR_GOOD
from tests.support.books import assert_books_balance
from tests.support.runs import Run

pytestmark = pytest.mark.e2e
Start = Callable[..., Run]
COMMON = (
    "rollout.deterministic=false",
    "rollout.max_response_len=40",
    "rollout.compiled=false",  # weights change within responses only if these take their time
    "train.optimizer.lr=1e-3",
    "eval.data=[]",
    "checkpoint.export_hf=false",
    "algorithm.correction.weight=token",
)


def steps_of(run: Run) -> list[dict[str, float]]:
    return [line for line in run.metrics() if "loss/total" in line]


def rows_of(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.run_dir / "samples.jsonl").read_text().splitlines()]


def weights_of(run: Run) -> dict[int, list[list[int]]]:
    """Step -> the weight versions that drew each of its samples."""
    found: dict[int, list[list[int]]] = {}
    for row in rows_of(run):
        found.setdefault(row["step"], []).append(row["weights"])
    return found


@pytest.mark.slow
def test_responses_go_on_with_new_weights_within_the_bound_of_staleness(start: Start) -> None:
    """Tokens drawn after a swap have the new weights' log-probs, whatever drew the earlier ones."""
    run = start("train", *COMMON, "rollout.mode=async", "rollout.max_staleness=2", "run.steps=6")
    assert run.finish() == 0, run.tail()
    run.assert_nothing_left()
    steps = steps_of(run)
    assert [line["step"] for line in steps] == list(range(1, 7))
    assert {line["rollout/samples"] for line in steps} == {16.0}
    assert sum(line["staleness/partial"] for line in steps) > 0, steps
    assert max(line["staleness/max"] for line in steps) == 2
    assert max(line["logprob_diff/arithmetic"] for line in steps) < 1e-4
    assert max(line["logprob_diff/stale"] for line in steps) > 1e-3
    assert all(0 < line["sync/parity_diff"] < 1e-4 for line in steps)
    assert all(0 <= line[f"idle/{who}"] < 1 for line in steps for who in ("trainer", "engines"))
    for step, drawn_by in weights_of(run).items():
        assert all(
            step - 1 - 2 <= min(versions) <= max(versions) <= step - 1 for versions in drawn_by
        )
    assert any(len(versions) > 1 for drawn_by in weights_of(run).values() for versions in drawn_by)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_step_off_trains_on_every_prompt_in_order_also_across_a_resume(
    start: Start, tmp_path: Path
) -> None:
    """The samples that were finished and not trained on are kept: the run is that of one launch."""
    one_step_off = ("rollout.mode=one_step_off", "rollout.deterministic=true", "run.steps=5")
    whole = start("train", *COMMON, *one_step_off, run_dir=tmp_path / "whole")
    assert whole.finish(300) == 0, whole.tail()
    first = start("train", *COMMON, *one_step_off, run_dir=tmp_path / "run")
    first.wait_for("step 2: train", poll_s=0.002)
    first.process.send_signal(signal.SIGUSR1)
    assert first.finish(300) == 75, first.tail()
    first.assert_nothing_left()
    run = start("train", *COMMON, *one_step_off, run_dir=tmp_path / "run")
    assert run.finish(300) == 0, run.tail()
    run.assert_nothing_left()
    assert re.search(r"[4-8] finished groups of the launch before are kept", run.log())
    assert_books_balance(run.run_dir, 5)
    responses = [[(row["step"], row["response"]) for row in rows_of(each)] for each in (run, whole)]
    assert responses[0] == responses[1]
    steps = steps_of(run)
    assert [line["staleness/max"] for line in steps] == [0, 1, 1, 1, 1]
    assert {line["staleness/partial"] for line in steps} == {0.0}
    assert max(line["logprob_diff/arithmetic"] for line in steps) < 1e-4
    trained = [row["prompt_index"] for row in rows_of(run)][::4]
    assert trained == ShuffledStream(range(6000), seed=0).take(5 * 4)


DROP = ["rollout.stale=drop", "rollout.partial=restart", "rollout.max_in_flight=8"]
DAPO = [
    "rollout.partial=wait",
    "rollout.dynamic_sampling=true",
    "rollout.max_rounds=2",
    "reward.workers=1",
]
REMAX = ["rollout.stale=correct", "algorithm.advantage=remax", "rollout.engines=2"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [DROP, DAPO, REMAX], ids=["drop", "dapo", "remax"])
def test_every_way_to_treat_stale_and_partial_samples(start: Start, options: list[str]) -> None:
    run = start(
        "train", *COMMON, "rollout.mode=async", *options, "run.steps=5", "eval.every_steps=2"
    )
    assert run.finish() == 0, run.tail()
    run.assert_nothing_left()
    steps = steps_of(run)
    assert [line["step"] for line in steps] == list(range(1, 6))
    assert {line["rollout/samples"] for line in steps} == {16.0}
    assert max(line["logprob_diff/arithmetic"] for line in steps) < 1e-4
    if options is not REMAX:
        assert max(line["staleness/max"] for line in steps) == 1
        assert {line["staleness/partial"] for line in steps} == {0.0}
    if options is DROP:
        assert steps[-1]["staleness/restarted"] > 0
    if options is DAPO:
        assert all(16 <= line["sampling/samples"] <= 5 * 16 for line in steps)


@pytest.mark.slow
def test_a_lost_engine_comes_back_and_its_last_death_ends_the_run(start: Start) -> None:
    """Killed in training and while a step waits for samples, then once more than is allowed."""
    run = start("train", *COMMON, "rollout.mode=async", "run.steps=500", "rollout.restarts=2")
    for phase in ("train", "rollout"):
        step = run.log().count(": train") + 2
        run.wait_for(f"step {step}: {phase}", poll_s=0.002)
        run.find_one("sglang::scheduler").kill()
        run.wait_for(f"step {step + 2}: train")
    run.find_one("mcore_rl.rollout.server").kill()
    assert run.finish(90) == 1, run.tail()
    assert re.search(DIED_FOR_GOOD, run.tail()), run.tail()
    run.assert_nothing_left()
    steps = steps_of(run)
    assert {line["rollout/samples"] for line in steps} == {16.0}
    assert max(line["logprob_diff/arithmetic"] for line in steps) < 1e-4


@pytest.mark.slow
def test_ctrl_c_ends_the_sampling_too(start: Start) -> None:
    run = start("train", *COMMON, "rollout.mode=async", "run.steps=500", "reward.workers=1")
    run.wait_for("step 3: train")
    run.process.send_signal(signal.SIGINT)
    assert run.finish(60) == 130, run.tail()
    assert "Traceback" not in run.tail(), run.tail()
    run.assert_nothing_left()
