"""Turns a submission into a task of SkyPilot, launches it with `sky`, and asks for its state."""

import json
import re
from collections.abc import Mapping
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
from launch.options import SkyPilotOptions
from launch.submission import Submission, make_agent_options
from launch.text import dump_yaml, render
from mcore_rl.process.signals import EXIT_STATUS

TASK = "task.yaml"
RECIPE = "sent_recipe.yaml"
_MANAGED = "managed"
_NAME_LEN = 40
"""SkyPilot adds to it; clouds take about 60."""
_ON_NODES = "/tmp/mcore_rl_recipe.yaml"
_LAUNCH_TIMEOUT_S = 7200.0
"""`sky launch` provisions the machines before it returns."""
_RUNNING_STATES = ("RUNNING", "WINDING_DOWN", "CANCELLING", "SETTING_UP")
_WAITING_STATES = ("PENDING", "SUBMITTED", "STARTING", "RECOVERING", "INIT")


def make_files(submission: Submission, options: SkyPilotOptions) -> dict[str, str]:
    """The task, and the user's own recipe if there is one, by file name.

    Raises ValueError if no mount holds run.dir, or options contradict one another.
    """
    _check(submission, options)
    recipe = find_own_recipe(submission)
    files = {TASK: dump_yaml(_task(submission, options, recipe))}
    if recipe is not None:
        files[RECIPE] = read_recipe(recipe)
    return files


def submit_command(submission: Submission) -> list[str]:
    path = str(submission.folder / TASK)
    task = yaml.safe_load((submission.folder / TASK).read_text())
    secrets = [word for name in task.get("secrets", ()) for word in ("--secret", name)]
    if "job_recovery" in task["resources"]:
        return ["sky", "jobs", "launch", "--yes", "--detach-run", *secrets, path]
    return ["sky", "launch", "--yes", "--detach-run", "--cluster", task["name"], *secrets, path]


def submit(submission: Submission) -> str:
    """Launch the task in the submission's folder.

    Returns managed/<job> or <cluster>/<job>, the job's number as SkyPilot prints it.
    """
    command = submit_command(submission)
    shown = call(command, timeout_s=_LAUNCH_TIMEOUT_S)
    place = _MANAGED if command[1] == "jobs" else command[command.index("--cluster") + 1]
    numbers = re.findall(r"[Jj]ob(?: submitted,)? ID: (?:\x1b\[[0-9;]*m)*(\d+)", shown)
    if not numbers:
        raise RuntimeError(f"`sky` gave no number of a job; it said: {shown[-500:]}")
    return f"{place}/{numbers[-1]}"


def read_state(job: SubmittedJob) -> State:
    place, number = job.id.split("/")
    queue = ["jobs", "queue", "--all"] if place == _MANAGED else ["queue", place]
    shown = json.loads(call(["sky", *queue, "--output", "json"]))
    records = shown if place == _MANAGED else shown.get(place, [])
    found = next((r for r in records if str(r.get("job_id")) == number), None)
    if found is None:
        return State(ENDED, f"SkyPilot has forgotten job {job.id}")
    return record_state(job.id, found)


def log_command(job: SubmittedJob, follow: bool) -> list[str]:
    """A command that prints the job's log; with `follow` it goes on."""
    place, number = job.id.split("/")
    which = ["jobs", "logs", number] if place == _MANAGED else ["logs", place, number]
    return ["sky", *which, "--follow" if follow else "--no-follow", "--tail", "0"]


def cancel(job: SubmittedJob) -> None:
    place, number = job.id.split("/")
    which = ["jobs", "cancel", number] if place == _MANAGED else ["cancel", place, number]
    call(["sky", *which, "--yes"])


def _task(submission: Submission, options: SkyPilotOptions, recipe: Path | None) -> dict[str, Any]:
    name = make_job_name(options.name, submission, "launch.name", _NAME_LEN)
    task: dict[str, Any] = {
        "name": name,
        "resources": _resources(submission, options),
        "num_nodes": submission.needs.nodes,
    }
    mounts: dict[str, Any] = {
        path: {"source": bucket, "mode": "MOUNT"} for path, bucket in options.buckets.items()
    }
    if recipe is not None:
        mounts[_ON_NODES] = str(submission.folder / RECIPE)
    if mounts:
        task["file_mounts"] = mounts
    if options.volumes:
        task["volumes"] = dict(options.volumes)
    if options.environment:
        task["envs"] = dict(options.environment)
    if options.secrets:
        task["secrets"] = dict.fromkeys(options.secrets)
    if options.setup:
        task["setup"] = "\n".join(options.setup) + "\n"
    task["run"] = render(
        "skypilot.sh.jinja",
        submission=submission,
        folder=str(submission.job_folder / name),
        python=options.python,
        agent_options=[
            *make_agent_options(submission, options),
            *("--num-cpus", str(submission.needs.cpus_per_node)),
        ],
        arguments=replace_recipe(submission, _ON_NODES if recipe else None),
    )
    return task


def _resources(submission: Submission, options: SkyPilotOptions) -> dict[str, Any]:
    needs = submission.needs
    chosen: dict[str, Any] = {
        "infra": options.infra,
        "instance_type": options.instance_type,
        "image_id": options.image,
        "memory": f"{options.memory_gib_per_node}+" if options.memory_gib_per_node else "",
        "accelerators": {options.accelerator: needs.gpus_per_node} if needs.gpus_per_node else "",
        "cpus": "" if options.instance_type else f"{needs.cpus_per_node}+",
        "use_spot": options.use_spot,
        "disk_size": options.disk_gib,
        "network_tier": options.network_tier,
    }
    resources = {key: value for key, value in chosen.items() if value != ""}
    if options.managed:
        resources["job_recovery"] = {
            "max_restarts_on_errors": 0 if submission.is_doctor else options.retries,
            "recover_on_exit_codes": [EXIT_STATUS],
        }
    elif options.stop_after_idle_min:
        resources["autostop"] = {"idle_minutes": options.stop_after_idle_min, "down": True}
    return resources


def _check(submission: Submission, options: SkyPilotOptions) -> None:
    mounts = [*options.buckets, *options.volumes]
    require_absolute(mounts, "launch.buckets and launch.volumes")
    how = "launch.volumes./mnt/runs=<volume> or launch.buckets./mnt/runs=s3://<bucket>"
    require_mounted(submission, mounts, how)
    if submission.needs.gpus_per_node and not options.accelerator:
        raise ValueError(
            "launch.accelerator is not set: give SkyPilot's name of the GPU, such as H100, or"
            " launch.gpus_per_node=0"
        )
    if not options.image and not options.setup:
        raise ValueError(
            "launch.image and launch.setup are both empty, so no machine has this package: give the"
            " image that the Dockerfile builds as docker:<image>, or lines of shell that install it"
        )
    if options.use_spot and not options.managed:
        raise ValueError(
            "launch.use_spot=true with launch.managed=false: nothing starts the run again after a"
            " preemption; take launch.managed=true"
        )


def record_state(job_id: str, record: Mapping[str, Any]) -> State:
    """The state in a record of `sky queue` or `sky jobs queue`."""
    status = str(record.get("status", "")).rpartition(".")[2]
    details = [str(record[key]) for key in ("failure_reason", "details") if record.get(key)]
    recovered = f", recovered {n} times" if (n := record.get("recovery_count")) else ""
    text = f"job {job_id}: {status}{recovered}" + (f" ({'; '.join(details)})" if details else "")
    if status in _RUNNING_STATES:
        return State(RUNNING, text)
    if status in _WAITING_STATES:
        return State(WAITING, text)
    return State(ENDED, text, 0 if status == "SUCCEEDED" else None)
