"""A submission is written, refused before anything is written, or followed by its folder."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from launch.submit import cancel, show_logs, show_status, split, submit
from launch.targets import TARGETS
from mcore_rl.cli import main
from mcore_rl.config import Config
from mcore_rl.config.recipe import load_recipe
from tests.support.recipes import LARGE

CPU_NODES = ["launch.gpus_per_node=0", "launch.cpus_per_node=2"]


def load(settings: Sequence[str], command: str) -> Config:
    recipe = settings[0].removeprefix("recipe=")
    return load_recipe(recipe, list(settings[1:]))


@pytest.mark.parametrize(
    ("launch", "options", "files"),
    [
        ("slurm", [], {"job.sh"}),
        (
            "kuberay",
            ["launch.image=i", "launch.claims={runs: /mnt/runs}"],
            {"kuberay.yaml", "values.yaml"},
        ),
        ("skypilot", ["launch.image=docker:i", "launch.volumes={/mnt/runs: v}"], {"task.yaml"}),
    ],
)
def test_every_large_recipe_is_written_in_no_time(
    launch: str,
    options: list[str],
    files: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for recipe in LARGE:
        began = time.monotonic()
        folder = "/mnt/runs" if TARGETS[launch].options.is_away else str(tmp_path / "runs")
        words = [f"recipe={recipe}", f"run.dir={folder}/{recipe}", f"launch={launch}"]
        assert main(["submit", "--dry-run", *words, *options]) == 0
        assert time.monotonic() - began < 5
        written = {path.name for path in (tmp_path / "runs" / recipe / "launch").iterdir()}
        assert written == {*files, "recipe.yaml"}


def test_words_are_a_command_a_launch_file_and_settings() -> None:
    words = ["sft", "recipe=a", "launch=slurm", "launch.qos=x", "run.seed=1"]
    assert split(words) == ("sft", "slurm", ["launch.qos=x"], ["recipe=a", "run.seed=1"])
    assert split(["launch=local", "recipe=a"])[0] == "train"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipe=a"], r"give one launch=<.*local.*slurm"),
        (["serve", "launch=slurm"], r"serve: expected at most one command \(train, .* doctor\)"),
        (["train", "sft", "launch=slurm"], "sft: expected at most one command"),
        (["launch=slurm", "reward.judge.request.api_key=abc"], "request.api_key: its value is a"),
        (["launch=slurm", "judge.url=http://me:pw@host"], "judge.url: its value is a secret"),
        (["launch=slurm", "cluster.address=auto"], "a submitted job starts its own Ray"),
    ],
)
def test_wrong_words_are_named(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split(words)


def test_a_recipe_that_does_not_fit_writes_nothing(tmp_path: Path) -> None:
    words = ["recipe=kimi_k2_grpo_256_128", f"run.dir={tmp_path / 'run'}", "launch=slurm"]
    with pytest.raises(ValueError, match=r"launch.nodes=4, but the recipe needs 48 nodes"):
        submit([*words, "launch.nodes=4"], load, dry_run=True)
    assert not (tmp_path / "run").exists()


def test_a_job_that_fails_at_once_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The recipe's data are not there: the command refuses them, and the job ends with it."""
    run_dir = tmp_path / "run"
    words = ["recipe=tiny_moe_grpo", f"run.dir={run_dir}", "launch=local", *CPU_NODES]
    submit([*words, "model.path=/no/such/model"], load, dry_run=False)
    until = time.monotonic() + 120
    while (state := show_status(run_dir)).phase == "running":
        assert time.monotonic() < until
        time.sleep(0.5)
    assert state.exit_status == 2
    show_logs(run_dir, follow=True)
    assert "/no/such/model" in capfd.readouterr().out
    cancel(run_dir)
