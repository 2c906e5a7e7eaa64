"""Describes `submit doctor` to Kubernetes: an indexed Job whose pods are like those of the run."""

import math
from typing import Any

from launch.jobs import ENDED, RUNNING, WAITING, State
from launch.kuberay_pod import FILES, pod_template
from launch.options import KubeRayOptions
from launch.submission import Submission

KIND = "Job"
DOCTOR_SCRIPT = "doctor.sh"
_LABEL = "batch.kubernetes.io/"
_END_S = 10
_CHECK_S = 600
"""For the checks themselves, once all pods run."""


def doctor_spec(name: str, submission: Submission, options: KubeRayOptions) -> dict[str, Any]:
    """The Job's spec: as many pods as the run has, at once, each numbered by Kubernetes.

    A pod that finds a fault fails alone, so that the others end with the report.
    """
    num_pods = submission.needs.nodes
    template = pod_template(name, "doctor", submission, options)
    [container] = template["spec"]["containers"]
    del container["lifecycle"]  # nothing is saved
    container["command"] = ["bash", f"{FILES}/{DOCTOR_SCRIPT}"]
    container["env"] = [
        *container["env"],
        _field("JOB_UID", f"metadata.labels['{_LABEL}controller-uid']"),
        _field("NODE_NAME", "spec.nodeName"),
    ]
    template["spec"] |= {"restartPolicy": "Never", "terminationGracePeriodSeconds": _END_S}
    return {
        "completions": num_pods,
        "parallelism": num_pods,
        "completionMode": "Indexed",
        "backoffLimitPerIndex": 0,
        "activeDeadlineSeconds": math.ceil(options.start_timeout_s) + _CHECK_S,
        "ttlSecondsAfterFinished": options.keep_cluster_s,
        "template": template,
    }


def doctor_state(job_id: str, resource: dict[str, Any]) -> State:
    """The state that Kubernetes wrote into the Job."""
    status = resource.get("status", {})
    for condition in status.get("conditions", []):
        if condition.get("status") != "True":
            continue
        words = [condition.get(key) for key in ("reason", "message")]
        text = ": ".join(filter(None, words))
        if condition["type"] == "Complete":
            return State(ENDED, f"{job_id}: Complete", 0)
        if condition["type"] == "Failed":
            return State(ENDED, f"{job_id}: Failed ({text})", 1)
        if condition["type"] == "Suspended":
            return State(WAITING, f"{job_id}: Suspended")
    wanted, ready = resource["spec"]["completions"], status.get("ready", 0)
    phase = RUNNING if ready == wanted else WAITING
    return State(phase, f"{job_id}: {ready} of {wanted} pods run")


def list_pods(name: str) -> str:
    """Return the selector of the Job's pods."""
    return f"{_LABEL}job-name={name}"


def find_reporting_pod(name: str) -> str:
    """Return the selector of the pod that prints the report of all."""
    return f"{list_pods(name)},{_LABEL}job-completion-index=0"


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
