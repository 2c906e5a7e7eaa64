"""Turns a submission into objects of KubeRay, applies them, and asks kubectl for their state."""

import json
import re
import uuid
from pathlib import Path
from typing import Any

import yaml

from launch.away import (
    find_own_recipe,
    make_job_name,
    read_recipe,
    replace_recipe,
    require_absolute,
    require_mounted,
)
from launch.jobs import ENDED, RUNNING, WAITING, State, SubmittedJob, call
from launch.kuberay_doctor import DOCTOR_SCRIPT, doctor_state, find_reporting_pod, list_pods
from launch.kuberay_doctor import KIND as DOCTOR_KIND
from launch.kuberay_manifest import CONTEXT, KINDS, manifests
from launch.kuberay_pod import FILES, JOB_SCRIPT, LOG_SCRIPT, RECIPE, STOP_SCRIPT, SUBMISSION
from launch.options import KubeRayOptions
from launch.submission import Submission
from launch.text import dump_yaml, render
from mcore_rl.process.disk import write_whole

MANIFEST = "kuberay.yaml"
CHART_VALUES = "values.yaml"
"""The same objects for the chart in launch/helm/mcore-rl."""
_NAME_LEN = 47
"""KubeRay's limit; it adds to the name."""
_RECIPE_KIB = 900
"""A ConfigMap holds 1 MiB, with the scripts."""
_STOP_S = 300
_PHASES = {
    "Running": RUNNING,
    "Complete": ENDED,
    "Failed": ENDED,
    "ValidationFailed": ENDED,
}
"""RayJob's jobDeploymentStatus -> phase; in all others the job waits."""


def make_files(submission: Submission, options: KubeRayOptions) -> dict[str, str]:
    """The manifest, and the same as values of the chart, by file name.

    Raises ValueError if run.dir lies on no claim, or options contradict one another.
    """
    _check(submission, options)
    name = make_job_name(options.name, submission, "launch.name", _NAME_LEN)
    folder = str(submission.job_folder / name)
    recipe = find_own_recipe(submission)
    arguments = replace_recipe(submission, f"{FILES}/{RECIPE}" if recipe else None)
    files = _scripts(submission, options, folder, arguments)
    if recipe is not None:
        files[RECIPE] = _recipe_text(recipe)
    objects = manifests(name, submission, options, files)
    return {MANIFEST: dump_yaml(*objects), CHART_VALUES: dump_yaml({"manifests": objects})}


def _scripts(
    submission: Submission, options: KubeRayOptions, folder: str, arguments: list[str]
) -> dict[str, str]:
    if submission.is_doctor:
        words = {"submission": submission, "options": options, "arguments": arguments}
        doctor = render("kuberay_doctor.sh.jinja", folder=folder, python=options.python, **words)
        return {DOCTOR_SCRIPT: doctor}
    job = render(
        "kuberay_job.sh.jinja",
        submission=submission,
        folder=folder,
        python=options.python,
        arguments=arguments,
        mark=SUBMISSION,
    )
    return {
        JOB_SCRIPT: job,
        STOP_SCRIPT: render("kuberay_stop.sh.jinja", folder=folder),
        LOG_SCRIPT: render("kuberay_log.sh.jinja", folder=folder),
    }


def submit_command(submission: Submission) -> list[str]:
    return [*_kubectl(submission.folder), "apply", "--filename", str(submission.folder / MANIFEST)]


def submit(submission: Submission) -> str:
    """Apply the manifest in the submission's folder; return <namespace>/<kind>/<name>.

    A job of this name that ended is deleted before, as applying it again would change nothing; its
    run continues. Raises ValueError if one of this name has not ended.
    """
    _mark(submission.folder)
    resource = yaml_objects(submission.folder)[-1]
    metadata = resource["metadata"]
    job_id = f"{metadata['namespace']}/{resource['kind'].lower()}/{metadata['name']}"
    if (found := _resource(submission.folder, job_id)) is not None:
        if resource_state(job_id, found).phase != ENDED:
            raise ValueError(
                f"{job_id} exists and has not ended: cancel it with `mcore-rl cancel"
                f" {submission.folder.parent}`, or take another launch.name"
            )
        call(_name_context(submission.folder, job_id, "delete"))
    call(submit_command(submission))
    return job_id


def read_state(job: SubmittedJob) -> State:
    """The state that KubeRay reports; for a job that waits also its pods that do, and why."""
    found = _resource(Path(job.folder), job.id)
    if found is None:
        return State(ENDED, f"{job.id} is gone; its log is in run.dir/launch")
    state = resource_state(job.id, found)
    if state.phase != WAITING:
        return state
    return State(WAITING, state.text + _list_waiting_pods(job, found))


def log_command(job: SubmittedJob, follow: bool) -> list[str]:
    """A command that prints the job's log; with `follow` it goes on."""
    namespace, kind, name = job.id.split("/")
    mode = yaml_objects(Path(job.folder))[-1]["spec"].get("submissionMode")
    kubectl = [*_kubectl(Path(job.folder)), "--namespace", namespace]
    if kind == DOCTOR_KIND.lower():
        chosen = ["--selector", find_reporting_pod(name), "--tail=-1"]
        return [*kubectl, "logs", *(["--follow"] if follow else []), *chosen]
    if mode == "K8sJobMode":
        return [*kubectl, "logs", *(["--follow"] if follow else []), f"job/{name}"]
    if kind == "raycluster":
        head = f"ray.io/cluster={name},ray.io/node-type=head"
        chosen = ["--selector", head, "--tail=-1"]
        return [*kubectl, "logs", *(["--follow"] if follow else []), *chosen]
    # The operator submitted: no pod prints the log, but the script on the head keeps it.
    show = ["bash", f"{FILES}/{LOG_SCRIPT}", *(["--follow"] if follow else [])]
    return [*kubectl, "exec", f"service/{name}-head-svc", "--", *show]


def cancel(job: SubmittedJob) -> None:
    """Ask the run to save, wait until it has, and delete all that was submitted."""
    namespace, kind, name = job.id.split("/")
    kubectl = _kubectl(Path(job.folder))
    if kind != DOCTOR_KIND.lower():
        head = [*kubectl, "--namespace", namespace, "exec", f"service/{name}-head-svc", "--"]
        stop = ["bash", f"{FILES}/{STOP_SCRIPT}", str(_STOP_S)]
        call([*head, *stop], check=False, timeout_s=_STOP_S + 60)
    delete = [*kubectl, "delete", "--ignore-not-found", "--filename", f"{job.folder}/{MANIFEST}"]
    call(delete, timeout_s=_STOP_S + 60)


def yaml_objects(folder: Path) -> list[dict[str, Any]]:
    """The objects of the manifest in a job's folder; the last one is the job."""
    return list(yaml.safe_load_all((folder / MANIFEST).read_text()))


def _check(submission: Submission, options: KubeRayOptions) -> None:
    require_absolute(options.claims.values(), "launch.claims")
    require_mounted(submission, options.claims.values(), "launch.claims.<claim>=<path>")
    if submission.is_doctor and options.kind == "cluster":
        raise ValueError(
            "launch.kind=cluster with doctor, which starts pods of its own and no Ray: leave it out"
        )
    if not options.image:
        raise ValueError("launch.image is not set: give the image that the Dockerfile builds")
    store_mib = options.store_mib(submission.needs.gpus_per_node)
    if options.shm_gib and store_mib > options.shm_gib * 1024:
        raise ValueError(
            f"launch.shm_gib={options.shm_gib} has no room for Ray's {store_mib} MiB: raise it, or"
            " lower launch.object_store_mib"
        )
    if options.kind == "cluster" and options.submission_mode != "K8sJobMode":
        raise ValueError(
            f"launch.submission_mode={options.submission_mode} with launch.kind=cluster: nothing is"
            " submitted to a cluster for work by hand; leave it out"
        )


def _recipe_text(path: Path) -> str:
    text = read_recipe(path)
    if (kib := len(text.encode()) / 1024) > _RECIPE_KIB:
        raise ValueError(
            f"recipe={path} has {kib:.0f} KiB, and a ConfigMap takes {_RECIPE_KIB}: put it on a"
            " claim or into the image"
        )
    return text


def _mark(folder: Path) -> None:
    """Give the submission in the manifest a number of its own.

    Attempts of one submission know one another by it: where one was refused, the next ones are.
    """
    objects = yaml_objects(folder)
    objects[0]["data"][SUBMISSION] = uuid.uuid4().hex
    write_whole(folder / MANIFEST, dump_yaml(*objects))


def _kubectl(folder: Path) -> list[str]:
    """Return kubectl, with the context for which the manifest in a job's folder was made."""
    context = yaml_objects(folder)[-1]["metadata"].get("annotations", {}).get(CONTEXT)
    return ["kubectl", *([f"--context={context}"] if context else [])]


def _name_context(folder: Path, job_id: str, verb: str, *options: str) -> list[str]:
    namespace, kind, name = job_id.split("/")
    words = ["--namespace", namespace, verb, kind, name, "--ignore-not-found", *options]
    return [*_kubectl(folder), *words]


def _resource(folder: Path, job_id: str) -> dict[str, Any] | None:
    shown = call(_name_context(folder, job_id, "get", "--output=json"))
    return json.loads(shown) if shown.strip() else None


def resource_state(job_id: str, resource: dict[str, Any]) -> State:
    """The state that KubeRay wrote into a RayJob or RayCluster, or Kubernetes into a Job."""
    if resource["kind"] == DOCTOR_KIND:
        return doctor_state(job_id, resource)
    status = resource.get("status", {})
    if resource["kind"] == KINDS["cluster"]:
        state = status.get("state", "")
        reason = f" ({status['reason']})" if status.get("reason") else ""
        phase = RUNNING if state == "ready" else WAITING
        return State(phase, f"{job_id}: {state or 'new'}{reason}")
    deployment = status.get("jobDeploymentStatus", "")
    words = [word for word in (status.get("reason"), status.get("message")) if word]
    attempts = f", failed {failed} times" if (failed := status.get("failed")) else ""
    text = f"{job_id}: {deployment or 'New'}{attempts}"
    text += f" ({'; '.join(words)[:500]})" if words else ""
    phase = _PHASES.get(deployment, WAITING)
    return State(phase, text, _exit_status(deployment, status) if phase == ENDED else None)


def _exit_status(deployment: str, status: dict[str, Any]) -> int | None:
    """The status of the run's command, out of Ray's message, where the run ended by itself."""
    if deployment == "Complete" and status.get("jobStatus") == "SUCCEEDED":
        return 0
    found = re.search(r"exit code (\d+)", status.get("message", ""))
    return int(found[1]) if found else None


def _list_waiting_pods(job: SubmittedJob, resource: dict[str, Any]) -> str:
    """The pods that do not run, with the reason that Kubernetes gives."""
    namespace, _, name = job.id.split("/")
    cluster = resource.get("status", {}).get("rayClusterName") or name
    pods = list_pods(name) if resource["kind"] == DOCTOR_KIND else f"ray.io/cluster={cluster}"
    get = ["--namespace", namespace, "get", "pods", f"--selector={pods}", "--output=json"]
    shown = call([*_kubectl(Path(job.folder)), *get], check=False)
    reasons = [_reason(pod) for pod in json.loads(shown)["items"]] if shown.strip() else []
    return "".join(f"; {reason}" for reason in reasons if reason)


def _reason(pod: dict[str, Any]) -> str:
    """Why a pod does not run, or nothing if it does."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    for container in status.get("containerStatuses", []):
        if waiting := container.get("state", {}).get("waiting"):
            return f"{name}: {waiting.get('reason')} {waiting.get('message', '')}".strip()
    if status.get("phase") != "Pending":
        return ""
    told = [c["message"] for c in status.get("conditions", []) if c.get("message")]
    return f"{name}: {' '.join(told) or 'Pending'}"
