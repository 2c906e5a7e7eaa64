"""Gives the processes of a run the controller's environment variables, and compares them."""

import logging
import os
from collections import defaultdict
from collections.abc import Mapping

from mcore_rl.device.environment import AGREED, differences, forwarded

_log = logging.getLogger(__name__)

RAY_DEFAULTS = {
    "RAY_DEBUG": "legacy",  # breakpoint() answers to `ray debug`; "1" is the VS Code extension's
    "RAY_worker_niceness": "0",  # else ranks and engines run at nice 15
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ranks and engines see all GPUs of their machine: mcore_rl/device/environment.py.
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def set_defaults() -> None:
    """Set the variables of a run in this process; those that the caller has set are kept."""
    for name, value in {**RAY_DEFAULTS, **AGREED}.items():
        os.environ.setdefault(name, value)


def variables_for_workers() -> dict[str, str]:
    """Return what the processes on other machines get of this process's environment."""
    of_ray = {name: os.environ[name] for name in RAY_DEFAULTS}
    return {**of_ray, **forwarded(os.environ)}


def compare_environments(environments: Mapping[str, Mapping[str, str]]) -> None:
    """Warn of variables in which processes, by name, differ from this one.

    Raises ValueError if it is one of those on which all must agree.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for who, environment in environments.items():
        for variable, how in differences(os.environ, environment).items():
            found[f"{variable} is {how}"].append(who)
            if variable in AGREED:
                raise ValueError(
                    f"{who}: {variable} is {how}, but all processes of a run must have the same:"
                    " unset it on that machine, or set it alike where the run is started"
                )
    for what, who in found.items():
        others = f" and {len(who) - 1} others" if len(who) > 1 else ""
        _log.warning("%s in %s%s", what, who[0], others)
