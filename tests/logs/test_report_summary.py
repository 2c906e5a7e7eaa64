"""Numbers of summary.json: each from the right rows, None without them."""

import pytest

from mcore_rl.logs.run_report import summarize


def test_numbers_of_a_run() -> None:
    rows = [{"step": 0, "eval/greedy_accuracy": 0.4}]
    for step, seconds in ((1, 0.9), (2, 0.2), (3, 0.3)):
        rows.append(
            {
                "step": step,
                "reward/mean": 0.5,
                "rollout/samples": 32.0,
                "time/step": 2.0,
                "sync/seconds": seconds,
                "logprob_diff/mean": step * 1e-5,
            }
        )
    rows.append({"step": 3, "eval/greedy_accuracy": 0.85})
    assert summarize(rows) == pytest.approx(
        {
            "warm_start_accuracy": 0.4,
            "final_accuracy": 0.85,
            "grpo_steps": 3,
            "train_seconds": 6.0,
            "step0_logprob_diff_mean": 1e-5,
            "samples_per_second": 16.0,
            "sync_seconds_median": 0.3,
        }
    )


def test_a_run_that_was_resumed_late_has_no_warm_start_accuracy() -> None:
    rows = [{"step": 4, "reward/mean": 0.5}, {"step": 4, "eval/greedy_accuracy": 0.9}]
    summary = summarize(rows)
    assert (summary["warm_start_accuracy"], summary["final_accuracy"]) == (None, 0.9)
    assert summary["step0_logprob_diff_mean"] is None


def test_an_older_evaluation_is_not_the_final_one() -> None:
    rows = [{"step": 0, "eval/greedy_accuracy": 0.4}, {"step": 1, "reward/mean": 0.5}]
    summary = summarize(rows)
    assert (summary["warm_start_accuracy"], summary["final_accuracy"]) == (0.4, None)
    assert summary["train_seconds"] is None and summary["samples_per_second"] is None
