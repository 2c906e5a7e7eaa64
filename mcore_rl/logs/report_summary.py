"""Computes the numbers of summary.json from rows of metrics."""

from collections.abc import Sequence
from statistics import median

from mcore_rl.logs.report_rows import Row, series

Summary = dict[str, float | int | None]


_NAMES = {"reward/mean", "time/step", "sync/seconds", "rollout/samples", "logprob_diff/mean"}


def is_summarized(name: str) -> bool:
    """Return whether a report of a run looks at numbers of that name."""
    return name in _NAMES or name.startswith("eval/")


def summarize(rows: Sequence[Row]) -> Summary:
    """Return the numbers of summary.json; None if the run did not log what a number needs.

    final_accuracy    after the last step; an older evaluation is never used instead
    train_seconds     wall time of all steps, without evaluations and start-up
    step0_logprob_diff_mean
                      at the first step, whose samples come from the initial weights
    """
    last_step = max(step for step, _ in series(rows, "reward/mean"))
    accuracies = dict(series(rows, "eval/greedy_accuracy"))
    steps = series(rows, "time/step")
    synced = series(rows, "sync/seconds")
    num_samples = sum(value for _, value in series(rows, "rollout/samples"))
    train_seconds = sum(value for _, value in steps)
    return {
        "warm_start_accuracy": accuracies.get(0),
        "final_accuracy": accuracies.get(last_step),
        "grpo_steps": last_step,
        "train_seconds": train_seconds if steps else None,
        "step0_logprob_diff_mean": dict(series(rows, "logprob_diff/mean")).get(1),
        "samples_per_second": num_samples / train_seconds if train_seconds else None,
        "sync_seconds_median": median(value for _, value in synced) if synced else None,
    }
