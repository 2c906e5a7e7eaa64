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
from tests.support.recipes import LARGE_BY_LANE
from tests.support.stub_inputs import stub_inputs

ON_MOUNT = ["model.path=/mnt/runs/m", "data.train=[/mnt/runs/a.jsonl]", "eval.data=[]"]
CPU_NODES = ["launch.gpus_per_node=0", "launch.cpus_per_node=2"]


def load(settings: Sequence[str], command: str) -> Config:
    recipe = settings[0].removeprefix("recipe=")
    return load_recipe(recipe, list(settings[1:]))


@pytest.mark.parametrize("recipe", LARGE_BY_LANE)
@pytest.mark.parametrize(
    ("launch", "options", "files"),
    [
        ("slurm", [], {"job.sh"}),
        pytest.param(
            "kuberay",
            ["launch.image=i", "launch.claims={runs: /mnt/runs}"],
            {"kuberay.yaml", "values.yaml"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "skypilot",
            ["launch.image=docker:i", "launch.volumes={/mnt/runs: v}"],
            {"task.yaml"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_large_recipe_is_written_in_no_time(
    recipe: str,
    launch: str,
    options: list[str],
    files: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    is_away = TARGETS[launch].options.is_away
    folder = "/mnt/runs" if is_away else str(tmp_path / "runs")
    words = [f"recipe={recipe}", f"run.dir={folder}/{recipe}", f"launch={launch}"]
    words += ON_MOUNT if is_away else stub_inputs(tmp_path, recipe)
    if is_away and "search" in recipe:
        words.append("search.index=/mnt/runs/index")
    began = time.process_time()
    assert main(["submit", "--dry-run", *words, *options]) == 0
    # The first one of a process imports a lot, for 4 s or more; the largest recipe takes 6 s.
    assert time.process_time() - began < 20
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
    words += stub_inputs(tmp_path, "kimi_k2_grpo_256_128")
    with pytest.raises(ValueError, match=r"launch.nodes=4, but the recipe needs 48 nodes"):
        submit([*words, "launch.nodes=4"], load, dry_run=True)
    assert not (tmp_path / "run").exists()


def test_a_job_has_the_status_and_the_output_of_its_nodes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The interpreter of its nodes is a script that fails."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho alas\nexit 2\n")
    python.chmod(0o755)
    follow_to_its_end(tmp_path, capfd, "alas", f"launch.python={python}")


@pytest.mark.slow
def test_a_job_that_fails_at_once_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The model has no tokenizer: the command refuses the model, and the job ends with it."""
    follow_to_its_end(tmp_path, capfd, "no tokenizer there")


def follow_to_its_end(
    folder: Path, capfd: pytest.CaptureFixture[str], said: str, *more: str
) -> None:
    """Check that a job on this machine ends with status 2 and has said why."""
    run_dir = folder / "run"
    inputs = stub_inputs(folder, "qwen3_30b_a3b_grpo_8")
    words = ["recipe=tiny_moe_grpo", f"run.dir={run_dir}", "launch=local", *CPU_NODES, *more]
    submit([*words, *inputs, "plan.gpu_memory_gib=1000", "model.init=random"], load, dry_run=False)
    until = time.monotonic() + 120
    while (state := show_status(run_dir)).phase == "running":
        assert time.monotonic() < until
        time.sleep(0.5)
    assert state.exit_status == 2
    show_logs(run_dir, follow=True)
    assert said in capfd.readouterr().out
    cancel(run_dir)


QWEN = "qwen3_30b_a3b_grpo_32"
PODS = ["launch=kuberay", "launch.image=i", "launch.claims={runs: /mnt/runs}"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.path=recipes/model/qwen3_30b_a3b"], "^model.path=.* holds config.json alone"),
        (["data.train=[no.jsonl]"], "^data.train: data file no.jsonl does not exist"),
        (["reward.path=no.py"], "^reward.path=no.py: no such file"),
        (["reward.name=no"], "reward.name=no: .*math.py has no 'no'"),
        (["plan.gpu_memory_gib=40"], "^plan.gpu_memory_gib=40: does not fit: .* nearest layout"),
        (["parallel.tp=4", "cluster.gpus=32"], "^cluster.gpus=32, but the recipe takes 48 GPUs"),
        (["parallel.pp=5"], "does not divide num_hidden_layers"),
        (["eval", "eval.data=[]"], "^eval.data is not set"),
        (["sft", "sft.data=[no.jsonl]"], "^sft.data: data file no.jsonl does not exist"),
    ],
)
def test_what_the_command_would_refuse_is_not_submitted(
    words: list[str], message: str, tmp_path: Path
) -> None:
    given = [f"recipe={QWEN}", f"run.dir={tmp_path / 'run'}", "launch=slurm"]
    with pytest.raises(ValueError, match=message):
        submit([*given, *stub_inputs(tmp_path, QWEN), *words], load, dry_run=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run.dir=runs/a"], "^run.dir: runs/a is relative, .* give the whole path there"),
        (["model.path=/data/m"], r"^model.path: /data/m lies in no folder .*they have /mnt/runs\)"),
        (["data.train=[a.jsonl]"], "^data.train: a.jsonl is relative, and the job's nodes do not"),
        (["eval.data=[/data/a.jsonl]"], "^eval.data: /data/a.jsonl lies in no folder .* launch.cl"),
        (["reward.path=/data/r.py"], "^reward.path: /data/r.py lies in .* launch.image_folders if"),
        (["plan.gpu_memory_gib=40"], "^plan.gpu_memory_gib=40: does not fit: "),
    ],
)
def test_a_path_outside_the_mounts_of_pods_is_not_submitted(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [f"recipe={QWEN}", "run.dir=/mnt/runs/a", *ON_MOUNT, *PODS]
    with pytest.raises(ValueError, match=message):
        submit([*given, *words], load, dry_run=True)
    assert not list(tmp_path.iterdir())


def test_what_pods_have_is_taken_for_granted_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [f"recipe={QWEN}", "run.dir=/mnt/runs/a", *ON_MOUNT, *PODS]
    submit([*given, "reward.path=/code/r.py", "launch.image_folders=[/code]"], load, dry_run=True)
    said = capsys.readouterr().out
    assert "qwen3_30b_a3b, as model.path=/mnt/runs/m: only the nodes have it" in said
    nothing = ["data.train=[]", "model.path=/data/m", "launch.kind=cluster"]
    submit([*given, *nothing], load, dry_run=True)  # runs no command by itself
    submit(["doctor", *given, *nothing[:-1]], load, dry_run=True)
