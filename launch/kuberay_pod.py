"""Describes the pods of a job as KubeRay takes them: a template for each group of nodes."""

import json
from collections.abc import Mapping
from typing import Any

from launch.options import KubeRayOptions
from launch.submission import Submission

FILES = "/etc/mcore-rl"
"""Where pods find the files of the job's ConfigMap."""
JOB_SCRIPT = "job.sh"
STOP_SCRIPT = "stop.sh"
LOG_SCRIPT = "log.sh"
RECIPE = "recipe.yaml"
SUBMISSION = "submission"
"""A number that `mcore-rl submit` gives to each submission; kubectl called by hand gives none."""
_GRACE_S = 30
"""For Ray's own end, after the run has saved."""


def pod_template(
    name: str, container: str, submission: Submission, options: KubeRayOptions
) -> dict[str, Any]:
    """The template of a pod that is a node. `name` is the job's, `container` the container's."""
    return {
        "metadata": {"labels": {"app.kubernetes.io/name": "mcore-rl"}},
        "spec": {
            **_make_scheduling(options),
            "containers": [_container(container, submission, options)],
            "volumes": _volumes(name, options),
            "terminationGracePeriodSeconds": options.save_before_end_s + _GRACE_S,
        },
    }


def submitter_template(options: KubeRayOptions) -> dict[str, Any]:
    """The template of the pod that waits for Ray's head, submits the command and prints its log.

    It needs no GPU, so it goes where the cluster puts it; the image is that of the nodes because
    both ends must speak the same Ray.
    """
    resources = {"cpu": "1", "memory": "2Gi"}
    container = {
        "name": "ray-job-submitter",
        "image": options.image,
        "imagePullPolicy": options.image_pull_policy,
        "resources": {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": resources},
    }
    return {"spec": {**_identity(options), "containers": [container], "restartPolicy": "Never"}}


def ray_start_params(
    submission: Submission, options: KubeRayOptions, kind: str | None
) -> dict[str, str]:
    """Options of `ray start`. `kind` is the custom resource of a node that is kept for one part."""
    needs = submission.needs
    params = {
        "num-cpus": str(needs.cpus_per_node),
        "num-gpus": str(needs.gpus_per_node),
        "object-store-memory": str(options.store_mib(needs.gpus_per_node) * 2**20),
    }
    if kind is not None:
        # KubeRay puts the value into a command of a shell as it is.
        params["resources"] = "'" + json.dumps({kind: 1}) + "'"
    return params


def _container(name: str, submission: Submission, options: KubeRayOptions) -> dict[str, Any]:
    resources = _resources(submission, options)
    stop = ["/bin/bash", f"{FILES}/{STOP_SCRIPT}", str(options.save_before_end_s)]
    container: dict[str, Any] = {
        "name": name,
        "image": options.image,
        "imagePullPolicy": options.image_pull_policy,
        "env": _environment(options),
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "files", "mountPath": FILES, "readOnly": True},
            *({"name": claim, "mountPath": path} for claim, path in options.claims.items()),
        ],
        "lifecycle": {"preStop": {"exec": {"command": stop}}},
    }
    if name == "ray-head":
        container["ports"] = [
            {"name": "gcs-server", "containerPort": 6379},
            {"name": "dashboard", "containerPort": 8265},
            {"name": "client", "containerPort": 10001},
        ]
    if options.capabilities:
        container["securityContext"] = {"capabilities": {"add": list(options.capabilities)}}
    return container


def _resources(submission: Submission, options: KubeRayOptions) -> dict[str, str]:
    """A node's CPUs, memory and devices. Requests equal limits: others are evicted first."""
    needs = submission.needs
    resources = {"cpu": str(needs.cpus_per_node)}
    if options.memory_gib_per_node:
        resources["memory"] = f"{options.memory_gib_per_node}Gi"
    if needs.gpus_per_node:
        resources[options.gpu_resource] = str(needs.gpus_per_node)
    if options.rdma_resource:
        resources[options.rdma_resource] = str(options.rdma_per_node)
    return resources


def _environment(options: KubeRayOptions) -> list[dict[str, Any]]:
    """Variables of Ray's processes and all below them, secrets by reference."""
    # It imports torch, which a mistake on the command line need not wait for.
    from mcore_rl.cluster.environment import RAY_DEFAULTS

    interface = (
        {f"{library}_SOCKET_IFNAME": options.interface for library in ("NCCL", "GLOO")}
        if options.interface
        else {}
    )
    plain: Mapping[str, str] = {**RAY_DEFAULTS, **interface, **options.environment}
    references = {
        name: dict(zip(("name", "key"), reference.split("/"), strict=True))
        for name, reference in options.secrets.items()
    }
    return [
        *({"name": name, "value": value} for name, value in plain.items()),
        *(
            {"name": name, "valueFrom": {"secretKeyRef": reference}}
            for name, reference in references.items()
        ),
    ]


def _volumes(name: str, options: KubeRayOptions) -> list[dict[str, Any]]:
    shm: dict[str, Any] = {"medium": "Memory"}
    if options.shm_gib:
        shm["sizeLimit"] = f"{options.shm_gib}Gi"
    claims = [
        {"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in options.claims
    ]
    return [
        {"name": "shm", "emptyDir": shm},
        {"name": "files", "configMap": {"name": name}},
        *claims,
    ]


def _identity(options: KubeRayOptions) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if options.service_account:
        found["serviceAccountName"] = options.service_account
    if options.image_pull_secrets:
        found["imagePullSecrets"] = [{"name": name} for name in options.image_pull_secrets]
    return found


def _make_scheduling(options: KubeRayOptions) -> dict[str, Any]:
    found = _identity(options)
    if options.priority_class:
        found["priorityClassName"] = options.priority_class
    if options.node_selector:
        found["nodeSelector"] = dict(options.node_selector)
    if options.tolerations:
        found["tolerations"] = [_toleration(taint) for taint in options.tolerations]
    if options.host_network:
        found["hostNetwork"] = True
        found["dnsPolicy"] = "ClusterFirstWithHostNet"
    return found


def _toleration(taint: str) -> dict[str, str]:
    """A toleration of `key`, `key=value`, `key:effect` or `key=value:effect`, as kubectl writes."""
    left, _, effect = taint.partition(":")
    key, has_value, value = left.partition("=")
    found = {"key": key, "operator": "Equal" if has_value else "Exists"}
    if has_value:
        found["value"] = value
    if effect:
        found["effect"] = effect
    return found
