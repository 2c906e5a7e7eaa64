"""Jobs that KubeRay could not run are refused; its answers become states; the scripts work."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.jobs import ENDED, RUNNING, WAITING, SubmittedJob
from launch.kuberay import (
    MANIFEST,
    cancel,
    log_command,
    read_state,
    resource_state,
    submit,
    submit_command,
)
from launch.kuberay_pod import JOB_SCRIPT, STOP_SCRIPT, SUBMISSION
from tests.support.launches import files_of, written

RECIPE = "recipe=qwen3_30b_a3b_grpo_8"
WORDS = ("launch=kuberay", "launch.image=i", "launch.claims={runs: /mnt/runs}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run.dir=runs/a"], "run.dir=runs/a is relative, .* such as run.dir=/mnt/runs/a"),
        (["run.dir=/data/a"], r"run.dir=/data/a lies on no storage .*these are mounted: /mnt/runs"),
        (["launch.claims={runs: runs}"], "launch.claims: 'runs' is no place to mount at"),
        (["launch.image=''"], "launch.image is not set"),
        (["launch.secrets={A: value}"], "launch.secrets.A: expected <secret>/<key>"),
        (["launch.shm_gib=4"], "launch.shm_gib=4 has no room for Ray's 8192 MiB"),
        (["launch.kind=cluster", "launch.submission_mode=HTTPMode"], "nothing is submitted"),
        (["doctor", "launch.kind=cluster"], "launch.kind=cluster with doctor, .*: leave it out"),
    ],
)
def test_what_cannot_run_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        files_of(RECIPE, "run.dir=/mnt/runs/a", *WORDS, *words)


def test_a_recipe_of_ones_own_is_mounted(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("defaults: [qwen3_30b_a3b_grpo_8, _self_]\n")
    words = (f"recipe={recipe}", "run.dir=/mnt/runs/a", *WORDS)
    [files, _] = yaml.safe_load_all(files_of(*words)[MANIFEST])
    assert files["data"]["recipe.yaml"] == recipe.read_text()
    assert "train recipe=/etc/mcore-rl/recipe.yaml " in files["data"][JOB_SCRIPT]
    recipe.write_text(recipe.read_text() + "# long\n" * 150_000)
    with pytest.raises(ValueError, match=r"mine.yaml has 1025 KiB, and a ConfigMap takes 900"):
        files_of(*words)


@pytest.mark.parametrize(
    ("status", "phase", "exit_status", "text"),
    [
        ({}, WAITING, None, "New"),
        ({"jobDeploymentStatus": "Suspended"}, WAITING, None, "Suspended"),
        ({"jobDeploymentStatus": "Retrying", "failed": 2}, WAITING, None, "failed 2 times"),
        ({"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}, RUNNING, None, "Running"),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}, ENDED, 0, "Complete"),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED"}, ENDED, None, "Complete"),
        (
            {
                "jobDeploymentStatus": "Failed",
                "reason": "AppFailed",
                "message": "Job entrypoint command failed with exit code 75, last available logs",
            },
            ENDED,
            75,
            r"AppFailed; Job entrypoint command failed",
        ),
    ],
)
def test_a_job_is_where_kuberay_says(
    status: dict[str, Any], phase: str, exit_status: int | None, text: str
) -> None:
    state = resource_state("ns/rayjob/a", {"kind": "RayJob", "status": status})
    assert (state.phase, state.exit_status) == (phase, exit_status)
    assert text in state.text


def test_a_cluster_runs_once_all_its_pods_do() -> None:
    ready = {"kind": "RayCluster", "status": {"state": "ready"}}
    assert resource_state("ns/raycluster/a", ready).phase == RUNNING
    assert resource_state("ns/raycluster/a", {"kind": "RayCluster"}).phase == WAITING


class Kubectl:
    """A kubectl that notes how it is called and answers from files; there is no cluster here."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        program = folder / "kubectl"
        program.write_text(
            f'#!/bin/bash\necho "$*" >> {folder}/calls\n'
            f'for word in "$@"; do [ -e {folder}/"$word".json ] && exec cat {folder}/"$word".json'
            "\ndone\nexit 0\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.chdir(folder)

    def answer(self, word: str, content: object) -> None:
        (self._folder / f"{word}.json").write_text(json.dumps(content))

    def calls(self) -> list[str]:
        calls = (self._folder / "calls").read_text().splitlines()
        (self._folder / "calls").unlink()
        return calls


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    return Kubectl(tmp_path, monkeypatch)


def test_a_job_is_applied_watched_and_deleted(kubectl: Kubectl) -> None:
    submission = written(RECIPE, "run.dir=/mnt/runs/a", *WORDS)
    apply = " ".join(submit_command(submission)[1:])
    job = SubmittedJob("kuberay", submit(submission), "train-a", str(submission.folder))
    assert job.id == "default/rayjob/train-a"
    assert kubectl.calls()[-1] == apply
    kubectl.answer("rayjob", {"kind": "RayJob", "status": {"jobDeploymentStatus": "Initializing"}})
    conditions = [{"message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."}]
    pod = {"metadata": {"name": "p"}, "status": {"phase": "Pending", "conditions": conditions}}
    kubectl.answer("pods", {"items": [pod]})
    assert read_state(job).text.endswith(f"; p: {conditions[0]['message']}")
    with pytest.raises(ValueError, match=r"default/rayjob/train-a exists and has not ended"):
        submit(submission)
    ended = {"jobDeploymentStatus": "Failed", "message": "exit code 1"}
    kubectl.answer("rayjob", {"kind": "RayJob", "status": ended})
    assert read_state(job).exit_status == 1
    kubectl.calls()
    submit(submission)
    delete = "--namespace default delete rayjob train-a --ignore-not-found"
    assert kubectl.calls()[1:] == [delete, apply]
    assert log_command(job, follow=True)[-3:] == ["logs", "--follow", "job/train-a"]
    cancel(job)
    asked, deleted = kubectl.calls()
    assert "exec service/train-a-head-svc -- bash /etc/mcore-rl/stop.sh" in asked
    assert deleted == f"delete --ignore-not-found --filename {submission.folder / MANIFEST}"


def test_without_a_pod_that_submits_the_head_prints_the_log(
    kubectl: Kubectl,
) -> None:
    words = (RECIPE, "run.dir=/mnt/runs/a", *WORDS, "launch.submission_mode=HTTPMode")
    submission = written(*words)
    job = SubmittedJob("kuberay", submit(submission), "train-a", str(submission.folder))
    show = "exec service/train-a-head-svc -- bash /etc/mcore-rl/log.sh --follow"
    assert " ".join(log_command(job, follow=True)).endswith(show)


def scripts(folder: Path) -> dict[str, Path]:
    """The scripts of a job in `folder` whose recipe is refused at once."""
    words = (f"run.dir={folder}/run", f"launch.claims={{runs: {folder}}}", "launch.image=i")
    extra = ("launch=kuberay", f"launch.python={sys.executable}", "model.path=/no/such/model")
    [files, _] = yaml.safe_load_all(files_of(RECIPE, *words, *extra)[MANIFEST])
    for name, text in files["data"].items():
        (folder / name).write_text(text)
    return {name: folder / name for name in files["data"]}


def test_the_jobs_script_keeps_the_log_and_gives_the_runs_status(tmp_path: Path) -> None:
    environment = {**os.environ, "RAY_CLUSTER_NAME": "one"}
    script = scripts(tmp_path)[JOB_SCRIPT]
    done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stdout
    attempt = tmp_path / "run" / "launch" / "train-run" / "one"
    assert "/no/such/model" in done.stdout
    assert (attempt / "job.log").read_text() == done.stdout
    assert "mcore-rl ended with status 2" in done.stdout
    assert not (attempt / "running").exists()


def test_the_next_attempt_of_a_refused_submission_ends_at_once(tmp_path: Path) -> None:
    script = scripts(tmp_path)[JOB_SCRIPT]

    def attempt(name: str) -> str:
        environment = {**os.environ, "RAY_CLUSTER_NAME": name}
        done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True)
        assert done.returncode == 2
        log = tmp_path / "run" / "launch" / "train-run" / name / "job.log"
        assert log.read_text() == done.stdout
        return done.stdout

    again = "refused as in an earlier attempt"
    (tmp_path / SUBMISSION).write_text("1")
    assert again not in attempt("one")
    told = attempt("two")
    assert told.startswith(again) and "/no/such/model" in told
    assert not (tmp_path / "run" / "launch" / "train-run" / "two" / "running").exists()
    (tmp_path / SUBMISSION).write_text("2")
    assert again not in attempt("three"), "another submission"
    (tmp_path / SUBMISSION).unlink()
    assert again not in attempt("four"), "applied by hand"


def test_each_submission_has_a_number_and_its_context(kubectl: Kubectl) -> None:
    words = (RECIPE, "run.dir=/mnt/runs/a", *WORDS, "launch.context=lab")
    submission = written(*words)
    job = SubmittedJob("kuberay", submit(submission), "train-a", str(submission.folder))

    def number() -> str:
        [files, _] = yaml.safe_load_all((submission.folder / MANIFEST).read_text())
        return files["data"][SUBMISSION]

    first = number()
    submit(submission)
    assert number() != first
    read_state(job)
    cancel(job)
    calls = [*kubectl.calls(), " ".join(log_command(job, follow=False)[1:])]
    assert len(calls) > 5 and all(call.startswith("--context=lab ") for call in calls), calls


def test_a_pod_waits_for_the_run_that_saves_and_for_no_other(tmp_path: Path) -> None:
    stop = ["bash", str(scripts(tmp_path)[STOP_SCRIPT]), "30"]
    environment = {**os.environ, "RAY_CLUSTER_NAME": "one"}
    attempt = tmp_path / "run" / "launch" / "train-run" / "one"
    began = time.monotonic()
    subprocess.run(stop, env=environment, check=True)
    assert not (attempt / "stop").exists(), "nothing ran, but it was asked to stop"
    attempt.mkdir(parents=True)
    (attempt / "running").touch()
    waiting = subprocess.Popen(stop, env=environment)
    while not (attempt / "stop").exists():
        assert time.monotonic() - began < 20
        time.sleep(0.1)
    assert waiting.poll() is None
    (attempt / "running").unlink()
    assert waiting.wait(10) == 0
