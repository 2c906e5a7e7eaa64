"""Deletes checkpoints that are neither among the newest nor among the best by a metric.

metrics.jsonl --> the metric at the step of each checkpoint --> the best ones, best.json
"""

import json
from collections.abc import Collection

from mcore_rl.config.run import CheckpointConfig
from mcore_rl.logs.rows import iter_rows_backward
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.process.disk import write_whole

BEST = "best.json"
"""In the folder of checkpoints: step, metric and value of the best one."""


def prune_checkpoints(folder: RunFolder, options: CheckpointConfig) -> None:
    """Delete all whole checkpoints except the newest and the best ones, as the options say."""
    steps = folder.complete_steps()
    best: list[int] = []
    if options.keep_best and steps:
        values = read_values(folder, options.best_metric, steps)
        sign = 1.0 if options.best_value == "highest" else -1.0
        best = sorted(values, key=lambda step: (sign * values[step], step), reverse=True)
        best = best[: options.keep_best]
        if best:
            told = {"step": best[0], "metric": options.best_metric, "value": values[best[0]]}
            write_whole(folder.checkpoints / BEST, json.dumps(told))
    folder.prune(options.keep, best)


def read_values(folder: RunFolder, metric: str, steps: Collection[int]) -> dict[int, float]:
    """Return by step the value of a metric, where it was logged for one of these steps."""
    values: dict[int, float] = {}
    first = min(steps)
    for row in iter_rows_backward(folder.path / "metrics.jsonl"):
        if row["step"] < first:
            break
        value = row.get(metric)
        if row["step"] in steps and value is not None:
            values.setdefault(row["step"], value)
    return values
