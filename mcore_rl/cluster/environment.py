"""Passes the controller's environment variables to the processes of a run, and compares them."""

import json
import logging
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_rl.config import ProfileConfig
from mcore_rl.device.environment import AGREED, choose_agreed, differences, select_forwarded
from mcore_rl.process.safe_path import SAFE_PATH

_log = logging.getLogger(__name__)
_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable with Ray's description of the job (ray/_private/runtime_env/constants.py)."""

_BY_NODE = "MCORE_RL_SET_BY_NODE"
"""Variable with the names of variables that each node sets for itself, separated by commas."""

RAY_DEFAULTS = {
    "RAY_DEBUG": "legacy",  # breakpoint() answers to `ray debug`; "1" is the VS Code extension's
    "RAY_worker_niceness": "0",  # Otherwise ranks and engines run at nice 15.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ranks and engines see all GPUs of their machine: mcore_rl/device/environment.py.
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def set_defaults(*, several_hosts: bool = False) -> None:
    """Set the variables of a run in this process, except those that the caller has set.

    several_hosts   the run may have more machines than this one
    """
    for name, value in {**RAY_DEFAULTS, **choose_agreed(several_hosts)}.items():
        os.environ.setdefault(name, value)


def set_for_node(values: Mapping[str, str]) -> None:
    """Set variables for this machine alone, such as the name of its network interface.

    Variables that the caller has set keep their values and reach the other machines.
    """
    own = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(own)
    os.environ[_BY_NODE] = ",".join(own)


def select_worker_variables() -> dict[str, str]:
    """Return the variables that processes on other machines get from this process.

    Left out are variables of a job that `ray job submit --runtime-env-json` began: the job's
    processes have them already, and Ray refuses a variable twice. Variables of `set_for_node` are
    left out as well, because each node has its own values.
    """
    of_ray = {name: os.environ[name] for name in RAY_DEFAULTS}
    job = json.loads(os.environ.get(_JOB, "{}")).get("runtime_env") or {}
    of_job = job.get("env_vars") or {}
    of_path = {name: os.environ[name] for name in (SAFE_PATH,) if name in os.environ}
    variables = {**of_ray, **of_path, **select_forwarded(os.environ)}
    left_out = {*of_job, *_list_node_variables()}
    return {name: value for name, value in variables.items() if name not in left_out}


def _list_node_variables() -> set[str]:
    return set(filter(None, os.environ.get(_BY_NODE, "").split(",")))


def compare_environments(environments: Mapping[str, Mapping[str, str]]) -> None:
    """Warn of variables that differ between this process and other processes, given by name.

    Raises ValueError if all processes must agree on a variable that differs.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for who, environment in environments.items():
        for variable, how in differences(os.environ, environment).items():
            if variable in _list_node_variables():
                continue
            found[f"{variable} is {how}"].append(who)
            if variable in AGREED:
                raise ValueError(
                    f"{who}: {variable} is {how}, but all processes of a run must have the same:"
                    " unset it on that machine, or set it alike where the run is started"
                )
    for what, who in found.items():
        others = f" and {len(who) - 1} others" if len(who) > 1 else ""
        _log.warning("%s in %s%s", what, who[0], others)


def make_nsys_environments(profile: ProfileConfig, folder: Path) -> dict[int, dict[str, Any]]:
    """Return Ray's runtime environment of each rank that Nsight Systems profiles."""
    if not profile.steps or profile.tool != "nsys":
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    options = {"t": "cuda,cudnn,cublas,nvtx", "c": "cudaProfilerApi", "capture-range-end": "repeat"}
    return {
        rank: {"nsight": {**options, "o": str(folder / f"trainer_rank{rank}")}}
        for rank in profile.ranks
    }
