"""Has Ray start on this machine with the processes that a run uses, and no others.

started                              left out
gcs_server, raylet                   dashboard        a page, the agents' modules for it
agent and runtime-env agent          log monitor      carries the ranks' output to the controller
ranks                                monitor          starts and ends machines (autoscaler)

A run writes the output of its ranks to files, and its machines are fixed.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray._private.node
import ray._private.utils

from mcore_rl.cluster import worker_setup

LEFT_OUT = ("start_api_server", "start_log_monitor", "start_monitor")
"""Methods of Ray's Node, each of which starts one process that only others of them need."""


@contextmanager
def small_ray() -> Iterator[None]:
    """Start Ray in the body without the processes of `LEFT_OUT` and without a dashboard's agents.

    The agents of `ray[default]` start two seconds later, and keep a core busy meanwhile; without
    what serves the dashboard they are as small as if only `ray` were installed.
    """
    replaced: list[tuple[Any, str, Any]] = [
        (ray._private.node.Node, name, _start_nothing) for name in LEFT_OUT
    ]
    replaced.append((ray._private.utils, "get_dashboard_dependency_error", _no_dashboard))
    node = ray._private.node.Node
    replaced.append((node, "start_raylet", _with_quick_setup(node.start_raylet)))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _with_quick_setup(start_raylet: Callable[..., None]) -> Callable[..., None]:
    """Have workers set up by worker_setup.py: Ray's own file imports Ray twice for each."""

    def start(node: Any, *args: object, **kwargs: object) -> None:
        parameters = node._ray_params
        os.environ[worker_setup.RAYS_OWN] = parameters.setup_worker_path
        parameters.setup_worker_path = worker_setup.__file__
        start_raylet(node, *args, **kwargs)

    return start


def _no_dashboard() -> ImportError:
    return ImportError("no dashboard is wanted")


def _start_nothing(*args: object, **kwargs: object) -> None: ...
