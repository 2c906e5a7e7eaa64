"""The newest checkpoints stay, and the best ones by a metric."""

import json
from pathlib import Path

import pytest

from mcore_rl.config import CheckpointConfig
from mcore_rl.config.recipe import load_recipe
from mcore_rl.logs.kept_checkpoints import prune_checkpoints, read_values
from mcore_rl.logs.logger import MetricsLogger
from mcore_rl.logs.run_folder import RunFolder
from tests.support.checkpoint_folders import write_checkpoint

ACCURACY = {0: 0.9, 2: 0.3, 4: 0.7, 6: 0.5, 8: 0.7, 10: 0.6, 12: 0.1}


def make_run(path: Path) -> RunFolder:
    """Return a folder with a checkpoint of each step but 0; step 10 has no accuracy."""
    folder = RunFolder(path)
    with MetricsLogger(path, console=False) as log:
        for step, value in ACCURACY.items():
            log.log(step, {"loss/nll": 1 - value})
            if step != 10:
                log.log(step, {"eval/greedy_accuracy": value})
            if step:
                write_checkpoint(folder.checkpoint(step))
    return folder


@pytest.mark.parametrize(
    ("options", "steps", "best"),
    [
        (CheckpointConfig(keep=2), [10, 12], None),
        (CheckpointConfig(keep=1, keep_best=2), [4, 8, 12], 8),
        (CheckpointConfig(keep=2, keep_best=3), [4, 6, 8, 10, 12], 8),
        (
            CheckpointConfig(
                keep=1, keep_best=1, best_metric="eval/greedy_accuracy", best_value="lowest"
            ),
            [12],
            12,
        ),
        (CheckpointConfig(keep=1, keep_best=3, best_metric="loss/nll"), [2, 6, 12], 12),
        (CheckpointConfig(keep=1, keep_best=1, best_metric="kl/ref"), [12], None),
    ],
)
def test_the_newest_and_the_best_are_kept(
    tmp_path: Path, options: CheckpointConfig, steps: list[int], best: int | None
) -> None:
    folder = make_run(tmp_path)
    prune_checkpoints(folder, options)
    assert folder.complete_steps() == steps
    file = folder.checkpoints / "best.json"
    assert (json.loads(file.read_text())["step"] if file.exists() else None) == best


def test_only_rows_of_the_checkpoints_steps_are_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    assert read_values(folder, "eval/greedy_accuracy", [4, 10, 12]) == {4: 0.7, 12: 0.1}


@pytest.mark.parametrize("settings", [["eval.every_steps=20"], ["eval.every_steps=0"]])
def test_checkpoints_without_their_accuracy_are_refused(settings: list[str]) -> None:
    given = ["checkpoint.keep_best=2", "checkpoint.every_steps=50"]
    with pytest.raises(ValueError, match=r"every_steps=50 must be a multiple of eval.every_steps"):
        load_recipe("tiny_moe_grpo", [*given, *settings])
    load_recipe("tiny_moe_grpo", [*given, "eval.every_steps=25"])
    load_recipe("tiny_moe_grpo", [*given, *settings, "checkpoint.best_metric=reward/mean"])
