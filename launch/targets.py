"""All targets by name: the options of each, and the functions that make, submit and watch a job."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launch import kuberay, local, skypilot, slurm
from launch.jobs import State, SubmittedJob
from launch.options import (
    KubeRayOptions,
    LaunchOptions,
    LocalOptions,
    SkyPilotOptions,
    SlurmOptions,
)
from launch.submission import Submission


@dataclass(frozen=True)
class Target:
    """A kind of cluster.

    make_files       (submission, options) -> text by file name; pure
    submit_command   the command that a dry run prints
    submit           submits what lies in the submission's folder, and returns the job's id
    log_command      (job, follow) -> a command that prints the job's log
    """

    options: type[LaunchOptions]
    make_files: Callable[[Submission, Any], dict[str, str]]
    submit_command: Callable[[Submission], list[str]]
    submit: Callable[[Submission], str]
    read_state: Callable[[SubmittedJob], State]
    log_command: Callable[[SubmittedJob, bool], list[str]]
    cancel: Callable[[SubmittedJob], None]


def _make_target(options: type[LaunchOptions], module: Any) -> Target:
    return Target(
        options,
        module.make_files,
        module.submit_command,
        module.submit,
        module.read_state,
        module.log_command,
        module.cancel,
    )


TARGETS = {
    "local": _make_target(LocalOptions, local),
    "slurm": _make_target(SlurmOptions, slurm),
    "kuberay": _make_target(KubeRayOptions, kuberay),
    "skypilot": _make_target(SkyPilotOptions, skypilot),
}
