"""A pod carries what the options ask for, and no secret by its value."""

from pathlib import Path
from typing import Any

from launch.kuberay_pod import FILES, STOP_SCRIPT, pod_template
from launch.options import KubeRayOptions
from launch.submission import Submission
from mcore_rl.cluster.environment import RAY_DEFAULTS
from mcore_rl.planning.bundles import NodeNeeds

SUBMISSION = Submission("train", ["recipe=a"], Path("/mnt/a"), NodeNeeds(2, 0, 8, 64))


def pod(**options: Any) -> dict[str, Any]:
    return pod_template("a", "ray-worker", SUBMISSION, KubeRayOptions(image="i", **options))["spec"]


def environment(spec: dict[str, Any]) -> dict[str, Any]:
    [container] = spec["containers"]
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def test_pods_have_the_variables_that_a_nodes_agent_sets() -> None:
    found = environment(pod(environment={"RAY_DEBUG": "1"}, interface="eth0"))
    assert RAY_DEFAULTS.items() <= {**found, "RAY_DEBUG": "legacy"}.items()
    assert found["RAY_DEBUG"] == "1"
    assert found["NCCL_SOCKET_IFNAME"] == found["GLOO_SOCKET_IFNAME"] == "eth0"


def test_a_secret_is_a_reference() -> None:
    reference = {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert environment(pod(secrets={"HF_TOKEN": "hub/token"}))["HF_TOKEN"] == reference


def test_taints_are_tolerated_as_kubectl_writes_them() -> None:
    taints = ["a", "b=c", "d:NoSchedule", "e=f:NoExecute"]
    assert pod(tolerations=taints)["tolerations"] == [
        {"key": "a", "operator": "Exists"},
        {"key": "b", "operator": "Equal", "value": "c"},
        {"key": "d", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "e", "operator": "Equal", "value": "f", "effect": "NoExecute"},
    ]


def test_a_pod_stays_until_the_run_has_saved() -> None:
    spec = pod(save_before_end_s=100)
    [container] = spec["containers"]
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command[1:] == [f"{FILES}/{STOP_SCRIPT}", "100"]
    assert spec["terminationGracePeriodSeconds"] > 100
