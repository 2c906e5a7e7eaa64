"""The objects of a job are what Kubernetes and KubeRay accept, and say what the recipe needs."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch import kuberay_manifest
from launch.kuberay import CHART_VALUES, MANIFEST
from tests.support.kubernetes import CRDS, VERSION, check_crd, pod_templates
from tests.support.launches import GOLDEN, files_of
from tests.support.policy import ROOT
from tests.support.recipes import LARGE, LARGE_BY_LANE

JOB = (
    "launch=kuberay",
    "run.dir=/mnt/runs/a",
    "launch.image=registry/mcore_rl:1",
    "launch.claims={runs: /mnt/runs}",
)
ALL_OPTIONS = (
    "launch.image_pull_secrets=[registry]",
    "launch.image_pull_policy=Always",
    "launch.rdma_resource=rdma/ib",
    "launch.rdma_per_node=8",
    "launch.memory_gib_per_node=1800",
    "launch.shm_gib=512",
    "launch.secrets={HF_TOKEN: hub/token}",
    "launch.environment={HF_HOME: /mnt/runs/hub}",
    "launch.interface=eth0",
    "launch.queue=training",
    "launch.priority_class=high",
    "launch.node_selector={gpu: h100}",
    "launch.tolerations=['nvidia.com/gpu:NoSchedule', 'team=ml']",
    "launch.service_account=trainer",
    "launch.host_network=true",
    "launch.capabilities=[IPC_LOCK]",
    "launch.time_limit_s=86400",
    "launch.namespace=ml",
    "launch.name=moonlight",
    "launch.context=lab",
)
CHART = ROOT / "launch" / "helm" / "mcore-rl"
KINDS = {
    "job": ("recipe=qwen3_30b_a3b_grpo_8",),
    "separate": ("recipe=qwen3_235b_a22b_grpo_64_64", "cluster.separate_nodes=true"),
    "all_options": ("recipe=moonlight_16b_a3b_grpo_8", "launch.nodes=2", *ALL_OPTIONS),
    "http": ("recipe=qwen3_30b_a3b_grpo_8", "launch.submission_mode=HTTPMode"),
    "cluster": ("recipe=qwen3_30b_a3b_grpo_32", "launch.kind=cluster"),
    "doctor": ("doctor", "recipe=qwen3_30b_a3b_grpo_32", "launch.queue=training"),
    "amd": (
        "recipe=qwen3_30b_a3b_grpo_8",
        "launch.gpu_resource=amd.com/gpu",
        "launch.auth=disabled",
    ),
}


RAYS = [words for kind, words in KINDS.items() if kind != "doctor"]
"""Those that KubeRay runs; the doctor is a Job of Kubernetes itself."""


def objects(*words: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(files_of(*words, *JOB)[MANIFEST]))


@pytest.mark.parametrize("kind", ["job", "separate", "all_options", "cluster", "doctor"])
def test_the_manifest_is_the_one_that_was_reviewed(kind: str) -> None:
    golden = GOLDEN / f"kuberay_{kind}.yaml"
    manifest = files_of(*KINDS[kind], *JOB)[MANIFEST]
    if os.environ.get("REWRITE_GOLDEN"):
        golden.write_text(manifest)
    assert manifest == golden.read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_kubernetes_accepts_pods_and_files(kind: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="in requirements/dev.txt")
    files, resource = objects(*KINDS[kind])
    validator.validate(files, VERSION, strict=True)
    if kind == "doctor":
        validator.validate(resource, VERSION, strict=True)
    templates = list(pod_templates(resource))
    assert templates
    for template in templates:
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        validator.validate(pod, VERSION, strict=True)
        pod["spec"] = {**pod["spec"], "nonsense": 1}
        with pytest.raises(validator.ValidationError):
            validator.validate(pod, VERSION, strict=True)


@pytest.mark.skipif(not CRDS, reason="KUBERAY_CRDS names no folder with KubeRay's CRDs")
@pytest.mark.parametrize("words", [*RAYS, *((f"recipe={name}",) for name in LARGE)])
def test_kuberay_accepts_the_job(words: tuple[str, ...]) -> None:
    _, resource = objects(*words)
    check_crd(resource)
    resource["spec"]["nonsense"] = 1
    with pytest.raises(Exception, match="nonsense"):
        check_crd(resource)


@pytest.mark.parametrize("recipe", LARGE_BY_LANE)
def test_every_node_of_the_recipe_is_a_pod_with_all_its_gpus(recipe: str) -> None:
    [_, job] = objects(f"recipe={recipe}")
    cluster = job["spec"]["rayClusterSpec"]
    groups = cluster["workerGroupSpecs"]
    nodes = 1 + sum(group["replicas"] for group in groups)
    assert f"cluster.num_nodes={nodes} " in files_of(f"recipe={recipe}", *JOB)[MANIFEST]
    for template in [cluster["headGroupSpec"]["template"], *(g["template"] for g in groups)]:
        [container] = template["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"


def test_separate_nodes_are_groups_with_rays_resources() -> None:
    [_, job] = objects(*KINDS["separate"])
    cluster = job["spec"]["rayClusterSpec"]
    groups = {g["groupName"]: g for g in cluster["workerGroupSpecs"]}
    assert {name: group["replicas"] for name, group in groups.items()} == {
        "trainer": 7,
        "engines": 8,
    }
    trainer = "'{\"trainer_node\": 1}'"
    assert cluster["headGroupSpec"]["rayStartParams"]["resources"] == trainer
    assert groups["trainer"]["rayStartParams"]["resources"] == trainer
    assert groups["engines"]["rayStartParams"]["resources"] == "'{\"engine_node\": 1}'"


def test_a_queued_job_waits_for_kueue() -> None:
    [_, job] = objects(*KINDS["all_options"])
    assert job["spec"]["suspend"] is True
    assert job["spec"]["shutdownAfterJobFinishes"] is True  # KubeRay suspends no other
    assert job["metadata"]["labels"][kuberay_manifest.QUEUE_LABEL] == "training"
    [_, job] = objects(*KINDS["job"])
    assert "suspend" not in job["spec"]


def test_the_chart_gets_the_same_objects() -> None:
    files = files_of(*KINDS["all_options"], *JOB)
    values = yaml.safe_load(files[CHART_VALUES])
    assert values == {"manifests": list(yaml.safe_load_all(files[MANIFEST]))}
    assert yaml.safe_load((CHART / "values.yaml").read_text()).keys() == values.keys()


@pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")
@pytest.mark.parametrize("kind", KINDS)
def test_helm_renders_what_kubectl_applies(kind: str, tmp_path: Path) -> None:
    files = files_of(*KINDS[kind], *JOB)
    (tmp_path / "values.yaml").write_text(files[CHART_VALUES])
    command = ["helm", "template", "a", str(CHART), "--values", str(tmp_path / "values.yaml")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rendered = [tree for tree in yaml.safe_load_all(shown) if tree]
    by_kind = {tree["kind"]: tree for tree in rendered}
    assert by_kind == {tree["kind"]: tree for tree in yaml.safe_load_all(files[MANIFEST])}
