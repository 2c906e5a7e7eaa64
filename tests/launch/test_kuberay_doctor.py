"""The doctor of a cluster's pods: one check in each, one report, and its end told as it was."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.jobs import ENDED, RUNNING, WAITING, SubmittedJob
from launch.kuberay import MANIFEST, cancel, log_command, read_state, submit
from launch.kuberay_doctor import DOCTOR_SCRIPT, doctor_state
from tests.launch.test_kuberay import Kubectl
from tests.support.launches import files_of, written

WORDS = ("doctor", "launch=kuberay", "launch.image=i")
FAILED = {"type": "Failed", "status": "True", "reason": "FailedIndexes", "message": "index 1"}


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    return Kubectl(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("status", "phase", "exit_status", "text"),
    [
        ({}, WAITING, None, "0 of 4 pods run"),
        ({"ready": 3}, WAITING, None, "3 of 4 pods run"),
        ({"ready": 4}, RUNNING, None, "4 of 4 pods run"),
        ({"conditions": [{"type": "Suspended", "status": "True"}]}, WAITING, None, "Suspended"),
        ({"conditions": [{"type": "Complete", "status": "True"}]}, ENDED, 0, "Complete"),
        ({"conditions": [FAILED]}, ENDED, 1, "Failed (FailedIndexes: index 1)"),
        ({"conditions": [{**FAILED, "status": "False"}], "ready": 4}, RUNNING, None, "4 of 4"),
    ],
)
def test_a_doctor_is_where_kubernetes_says(
    status: dict[str, Any], phase: str, exit_status: int | None, text: str
) -> None:
    resource = {"kind": "Job", "spec": {"completions": 4}, "status": status}
    state = doctor_state("ns/job/a", resource)
    assert (state.phase, state.exit_status) == (phase, exit_status)
    assert text in state.text


def test_a_doctor_is_submitted_watched_and_deleted(kubectl: Kubectl) -> None:
    words = ("recipe=qwen3_30b_a3b_grpo_32", "launch.claims={runs: /mnt/runs}")
    submission = written(*WORDS, *words, "run.dir=/mnt/runs/a")
    job = SubmittedJob("kuberay", submit(submission), "doctor-a", str(submission.folder))
    assert job.id == "default/job/doctor-a"
    kubectl.answer("job", {"kind": "Job", "spec": {"completions": 4}})
    containers = [{"state": {"waiting": {"reason": "ImagePullBackOff"}}}]
    pod = {"metadata": {"name": "p"}, "status": {"containerStatuses": containers}}
    kubectl.answer("pods", {"items": [pod]})
    assert read_state(job).text == "default/job/doctor-a: 0 of 4 pods run; p: ImagePullBackOff"
    assert "--selector=batch.kubernetes.io/job-name=doctor-a" in kubectl.calls()[-1]
    assert "job-completion-index=0" in " ".join(log_command(job, follow=True))
    cancel(job)
    [deleted] = kubectl.calls()
    assert deleted.startswith("delete ")


def run_pods(folder: Path, indices: list[int], start_s: int = 60) -> list[tuple[int, str]]:
    """Run the script of a Job of two pods as each of `indices`; return statuses and outputs."""
    nodes = ("launch.nodes=2", "launch.gpus_per_node=0", f"launch.start_timeout_s={start_s}")
    here = (f"launch.claims={{runs: {folder}}}", f"launch.python={sys.executable}")
    run = ("recipe=tiny_moe_grpo", "model.init=random", f"run.dir={folder}/run")
    [files, job] = yaml.safe_load_all(files_of(*WORDS, *run, *nodes, *here)[MANIFEST])
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    script = folder / DOCTOR_SCRIPT
    only = files["data"][DOCTOR_SCRIPT].replace(" --rendezvous", " --only folder --rendezvous")
    script.write_text(only)
    shell = {**os.environ, "JOB_UID": "u"}
    pods = [
        subprocess.Popen(
            ["bash", str(script)],
            env={**shell, "JOB_COMPLETION_INDEX": str(i), "NODE_NAME": f"n{i}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in indices
    ]
    printed = [pod.communicate(timeout=120)[0] for pod in pods]
    return [(pod.returncode, text) for pod, text in zip(pods, printed, strict=True)]


@pytest.mark.slow
def test_the_pods_meet_and_one_of_them_reports(tmp_path: Path) -> None:
    [(first, report), (second, other)] = run_pods(tmp_path, [0, 1])
    assert first == second == 0, report + other
    assert "the same packages on 2" in report and "n0, n1" in report, report
    assert "same packages" not in other, other


@pytest.mark.slow
def test_a_pod_that_does_not_come_is_missed(tmp_path: Path) -> None:
    [(status, report)] = run_pods(tmp_path, [0], start_s=3)
    assert status == 1 and "failed" in report and "node 1" in report, report
