"""Starts Ray on this machine with the processes that a run uses, and with a token of its own.

started                              left out
gcs_server, raylet                   dashboard        a page, the agents' modules for it
agent and runtime-env agent          log monitor      carries the ranks' output to the controller
ranks                                monitor          starts and ends machines (autoscaler)

A run writes the output of its ranks to files, and its machines are fixed.

Ray itself writes the token to ~/.ray/auth_token with the mode that umask leaves, as a rule 0644:
whoever reads it has Ray run what they like as this user. Where there is no home to write to, as
under an arbitrary user id in a container, the token goes to the run's own folder.
"""

import logging
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import ray._private.node
import ray._private.utils

from mcore_rl.cluster import worker_setup
from mcore_rl.process.variables import set_variables

_log = logging.getLogger(__name__)
_BY_USER = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_PATH = "RAY_AUTH_TOKEN_PATH"


LEFT_OUT = ("start_api_server", "start_log_monitor", "start_monitor")
"""Methods of Ray's Node, each of which starts one process that only others of them need."""


@contextmanager
def keep_own_token(folder: Path) -> Iterator[None]:
    """Make ~/.ray/auth_token, or a file in `folder`, with mode 0600, unless the user names a token.

    One that others can read is closed to them, and a warning says so.
    """
    if any(os.environ.get(name) for name in _BY_USER) or _keep_at_home():
        yield
        return
    path = folder / "token"
    _write(path)
    with set_variables({_PATH: str(path)}):
        yield


def _keep_at_home() -> bool:
    """Return whether Ray finds a token in the home that only this user can read."""
    home = os.environ.get("HOME")  # the only place where Ray looks it up
    if not home:
        return False
    path = Path(home, ".ray", "auth_token")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _write(path)
        found = path.stat()
        if found.st_mode & 0o077:
            path.chmod(0o600)
            _log.warning(
                "%s had mode %o, so that other users could read it, and has 600 now; if others use"
                " this machine, remove it while no Ray runs, and the next run makes another",
                path,
                found.st_mode & 0o777,
            )
        return found.st_uid == os.geteuid() and os.access(path, os.R_OK)
    except OSError:
        return False


def _write(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as file:
        file.write(_make_token())


@cache
def _make_token() -> str:
    """Return a token of 256 bits, one per process: Ray reads it once and keeps it."""
    return secrets.token_hex(32)


@contextmanager
def leave_processes_out() -> Iterator[None]:
    """Start Ray in the body without the processes of `LEFT_OUT` and without a dashboard's agents.

    The agents of `ray[default]` start two seconds later, and keep a core busy meanwhile; without
    what serves the dashboard they are as small as if only `ray` were installed.
    """
    replaced: list[tuple[Any, str, Any]] = [
        (ray._private.node.Node, name, _start_nothing) for name in LEFT_OUT
    ]
    replaced.append((ray._private.utils, "get_dashboard_dependency_error", _refuse_dashboard))
    node = ray._private.node.Node
    replaced.append((node, "start_raylet", _use_quick_setup(node.start_raylet)))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _use_quick_setup(start_raylet: Callable[..., None]) -> Callable[..., None]:
    """Have workers set up by worker_setup.py: Ray's own file imports Ray twice for each."""

    def start(node: Any, *args: object, **kwargs: object) -> None:
        parameters = node._ray_params
        os.environ[worker_setup.RAYS_OWN] = parameters.setup_worker_path
        parameters.setup_worker_path = worker_setup.__file__
        start_raylet(node, *args, **kwargs)

    return start


def _refuse_dashboard() -> ImportError:
    return ImportError("no dashboard is wanted")


def _start_nothing(*args: object, **kwargs: object) -> None: ...
