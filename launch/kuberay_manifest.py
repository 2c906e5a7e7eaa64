"""Describes a job to Kubernetes: a ConfigMap with its files, and a RayJob or RayCluster."""

import math
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from launch.kuberay_doctor import KIND as DOCTOR_KIND
from launch.kuberay_doctor import doctor_spec
from launch.kuberay_pod import (
    FILES,
    JOB_SCRIPT,
    pod_template,
    ray_start_params,
    submitter_template,
)
from launch.options import KubeRayOptions
from launch.submission import Submission
from mcore_rl.planning.bundles import ENGINE_NODE, TRAINER_NODE

KINDS = {"job": "RayJob", "cluster": "RayCluster"}
CONTEXT = "mcore-rl/kubectl-context"
"""Annotation of a submitted object."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def manifests(
    name: str, submission: Submission, options: KubeRayOptions, files: Mapping[str, str]
) -> list[dict[str, Any]]:
    """All objects of the job `name`; the pods find `files` in FILES."""
    labels = {"app.kubernetes.io/name": "mcore-rl"}
    metadata = {"name": name, "namespace": options.namespace, "labels": labels}
    queued = {**labels, QUEUE_LABEL: options.queue} if options.queue else labels
    # For status, logs and cancel, which read the manifest again.
    noted = {"annotations": {CONTEXT: options.context}} if options.context else {}
    if submission.is_doctor:
        api, kind = "batch/v1", DOCTOR_KIND
        spec = doctor_spec(name, submission, options)
    else:
        api, kind = "ray.io/v1", KINDS[options.kind]
        cluster = _cluster_spec(name, submission, options)
        spec = _job_spec(cluster, options) if options.kind == "job" else cluster
    if options.queue:
        spec["suspend"] = True  # Kueue lifts it once there is room for all pods
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": dict(files)},
        {
            "apiVersion": api,
            "kind": kind,
            "metadata": {**metadata, "labels": queued, **noted},
            "spec": spec,
        },
    ]


def _job_spec(cluster: dict[str, Any], options: KubeRayOptions) -> dict[str, Any]:
    spec: dict[str, Any] = {
        # A script, as the words of a command would pass through three shells.
        "entrypoint": f"bash {FILES}/{JOB_SCRIPT}",
        "submissionMode": options.submission_mode,
        # The same command continues from the newest checkpoint in run.dir.
        "backoffLimit": options.retries,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": options.keep_cluster_s,
        "preRunningDeadlineSeconds": math.ceil(options.start_timeout_s),
    }
    if options.submission_mode == "K8sJobMode":
        spec["submitterConfig"] = {"backoffLimit": options.submit_retries}
        spec["submitterPodTemplate"] = submitter_template(options)
    if options.time_limit_s:
        spec["activeDeadlineSeconds"] = options.time_limit_s
    return {**spec, "rayClusterSpec": cluster}


def _cluster_spec(name: str, submission: Submission, options: KubeRayOptions) -> dict[str, Any]:
    """The head is node 0 and has its GPUs; the other nodes are workers."""
    head_kind = TRAINER_NODE if submission.needs.trainer_nodes else None
    head = {
        "rayStartParams": {
            "dashboard-host": "0.0.0.0",
            **ray_start_params(submission, options, head_kind),
        },
        "template": pod_template(name, "ray-head", submission, options),
    }
    return {
        "rayVersion": version("ray"),
        "authOptions": {"mode": options.auth},
        "headGroupSpec": head,
        "workerGroupSpecs": [
            {
                "groupName": group,
                "replicas": count,
                "minReplicas": count,
                "maxReplicas": count,
                "rayStartParams": ray_start_params(submission, options, kind),
                "template": pod_template(name, "ray-worker", submission, options),
            }
            for group, count, kind in _groups(submission)
        ],
    }


def _groups(submission: Submission) -> Iterator[tuple[str, int, str | None]]:
    """Name, size and custom resource of each group of workers that is not empty."""
    needs = submission.needs
    if not needs.trainer_nodes:
        groups = [("workers", needs.nodes - 1, None)]
    else:
        groups = [
            ("trainer", needs.trainer_nodes - 1, TRAINER_NODE),
            ("engines", needs.engine_nodes, ENGINE_NODE),
        ]
    yield from (group for group in groups if group[1])
