"""The task is one that SkyPilot takes; its answers become states; its script starts the agents."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from launch.jobs import ENDED, RUNNING, WAITING, SubmittedJob
from launch.skypilot import (
    RECIPE,
    TASK,
    cancel,
    log_command,
    read_state,
    record_state,
    submit,
    submit_command,
)
from tests.support.launches import GOLDEN, files_of, written
from tests.support.recipes import LARGE_BY_LANE

BASE = ("launch=skypilot", "run.dir=/mnt/runs/a", "launch.image=docker:registry/mcore_rl:1")
VOLUME = "launch.volumes={/mnt/runs: my-volume}"
KINDS = {
    "managed": ("recipe=qwen3_30b_a3b_grpo_32", *BASE, VOLUME, "launch.use_spot=true"),
    "cluster": (
        "recipe=moonlight_16b_a3b_grpo_8",
        *BASE,
        "launch.buckets={/mnt/runs: 's3://my-bucket'}",
        "launch.managed=false",
        "launch.infra=aws/us-east-1",
        "launch.instance_type=p5.48xlarge",
        "launch.memory_gib_per_node=1000",
        "launch.secrets=[HF_TOKEN]",
        "launch.environment={HF_HOME: /mnt/runs/hub}",
        "launch.setup=[nvidia-smi]",
        "launch.name=moonlight",
    ),
    "doctor": ("doctor", "recipe=qwen3_30b_a3b_grpo_32", *BASE, VOLUME),
}
SCHEMA = json.loads((Path(__file__).parents[1] / "support" / "skypilot_schema.json").read_text())


def check(task: dict[str, Any]) -> None:
    """Raise jsonschema.ValidationError as SkyPilot would."""
    jsonschema.validate(task, SCHEMA["task"])
    jsonschema.validate(task["resources"], SCHEMA["resources"])
    for mount in task.get("file_mounts", {}).values():
        if not isinstance(mount, str):
            jsonschema.validate(mount, SCHEMA["storage"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_task_is_the_one_that_was_reviewed(kind: str) -> None:
    assert files_of(*KINDS[kind])[TASK] == (GOLDEN / f"skypilot_{kind}.yaml").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_skypilot_accepts_every_kind_of_task(kind: str) -> None:
    check_task(*KINDS[kind])


@pytest.mark.parametrize("recipe", LARGE_BY_LANE)
def test_skypilot_accepts_the_task_of_every_recipe(recipe: str) -> None:
    check_task(f"recipe={recipe}", *BASE, VOLUME)


def check_task(*words: str) -> None:
    """Check that SkyPilot's schema takes a task, and neither of two broken ones."""
    task = yaml.safe_load(files_of(*words)[TASK])
    check(task)
    for broken in ({**task, "nonsense": 1}, {**task, "resources": {"nonsense": 1}}):
        with pytest.raises(jsonschema.ValidationError):
            check(broken)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run.dir=runs/a"], "run.dir=runs/a is relative"),
        (["run.dir=/data/a"], r"run.dir=/data/a lies on no storage .*launch.volumes"),
        (["launch.volumes={runs: v}"], "'runs' is no place to mount at"),
        (["launch.accelerator=''"], "launch.accelerator is not set"),
        (["launch.image=''"], "launch.image and launch.setup are both empty"),
        (["launch.use_spot=true", "launch.managed=false"], "nothing starts the run again"),
    ],
)
def test_what_cannot_run_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        files_of("recipe=qwen3_30b_a3b_grpo_8", *BASE, VOLUME, *words)


def test_a_recipe_of_ones_own_goes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("defaults: [qwen3_30b_a3b_grpo_8, _self_]\n")
    files = files_of("recipe=mine.yaml", *BASE, VOLUME)
    assert files[RECIPE] == (tmp_path / "mine.yaml").read_text()
    task = yaml.safe_load(files[TASK])
    [(there, here)] = task["file_mounts"].items()
    assert f"train recipe={there} " in task["run"]
    assert Path(here) == tmp_path / "runs" / "a" / "launch" / RECIPE


@pytest.mark.parametrize(
    ("record", "phase", "exit_status"),
    [
        ({"status": "PENDING"}, WAITING, None),
        ({"status": "RECOVERING", "recovery_count": 2}, WAITING, None),
        ({"status": "ManagedJobStatus.RUNNING"}, RUNNING, None),
        ({"status": "SETTING_UP"}, RUNNING, None),
        ({"status": "SUCCEEDED"}, ENDED, 0),
        ({"status": "FAILED_NO_RESOURCE", "failure_reason": "no H100"}, ENDED, None),
        ({"status": "CANCELLED"}, ENDED, None),
    ],
)
def test_a_job_is_where_skypilot_says(
    record: dict[str, Any], phase: str, exit_status: int | None
) -> None:
    state = record_state("managed/1", record)
    assert (state.phase, state.exit_status) == (phase, exit_status)
    assert str(record.get("failure_reason", "")) in state.text


def test_a_job_is_launched_watched_and_canceled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sky` here notes how it is called, and answers what SkyPilot 0.14 prints."""
    queue = json.dumps([{"job_id": 7, "status": "RUNNING"}])
    (tmp_path / "sky").write_text(
        f'#!/bin/bash\necho "$*" >> {tmp_path}/calls\ncase "$*" in\n'
        f"*queue*) echo '{queue}';;\n*launch*) echo 'Job submitted, ID: 7';;\nesac\n"
    )
    (tmp_path / "sky").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    submission = written(*KINDS["managed"])
    assert submit_command(submission)[:4] == ["sky", "jobs", "launch", "--yes"]
    job = SubmittedJob("skypilot", submit(submission), "train-a", str(submission.folder))
    assert job.id == "managed/7"
    assert read_state(job).phase == RUNNING
    shown = ["sky", "jobs", "logs", "7", "--no-follow", "--tail", "0"]
    assert log_command(job, follow=False) == shown
    cancel(job)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[1:] == ["jobs queue --all --output json", "jobs cancel 7 --yes"]


@pytest.mark.e2e
@pytest.mark.slow
def test_the_nodes_of_a_task_meet_and_end_with_the_command(tmp_path: Path) -> None:
    """Two nodes as SkyPilot starts them; the command refuses a recipe whose model is not there."""
    words = ("recipe=tiny_moe_grpo", "launch=skypilot", f"run.dir={tmp_path}/run")
    machine = ("launch.nodes=2", "launch.gpus_per_node=0", "launch.cpus_per_node=1")
    rest = (f"launch.volumes={{{tmp_path}: v}}", f"launch.python={sys.executable}")
    recipe = ("model.path=/no/such/model", "cluster.cpus_per_rank=0.1", "launch.image=docker:i")
    script = yaml.safe_load(files_of(*words, *machine, *rest, *recipe)[TASK])["run"]
    addresses = ("127.0.0.2", "127.0.0.3")
    shared = {**os.environ, "SKYPILOT_NODE_IPS": "\n".join(addresses), "SKYPILOT_TASK_ID": "t"}
    nodes = [
        subprocess.Popen(
            ["bash", "-c", script],
            env={**shared, "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_INTERNAL_JOB_ID": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        shown = [node.communicate(timeout=240)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert "/no/such/model" in shown[0], shown
    assert [node.returncode for node in nodes] == [2, 0], shown
    [attempt] = (tmp_path / "run" / "launch" / "train-run" / "t").iterdir()
    assert (attempt / "done.json").exists()
