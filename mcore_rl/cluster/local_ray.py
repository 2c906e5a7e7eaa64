"""Starts Ray on this machine, with only the processes that a run uses and with its own token.

started                              left out
gcs_server, raylet                   dashboard        a page, and the agents' modules for the page
agent and runtime-env agent          log monitor      carries the ranks' output to the controller
ranks                                monitor          starts and ends machines (autoscaler)

A run writes the output of its ranks to files, and its machines are fixed.

Ray itself writes the token to ~/.ray/auth_token with the mode that umask leaves, usually 0644:
anyone who can read the token can have Ray run any program as this user. Without a writable home, as
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
"""Methods of Ray's Node; each starts a process that only the other left-out processes need."""


@contextmanager
def keep_own_token(folder: Path) -> Iterator[None]:
    """Make ~/.ray/auth_token, or a file in `folder`, with mode 0600, unless the user names a token.

    A token that other users can read gets mode 0600, and a warning says so.
    """
    if any(os.environ.get(name) for name in _BY_USER) or _keep_at_home():
        yield
        return
    path = folder / "token"
    _write(path)
    with set_variables({_PATH: str(path)}):
        yield


def _keep_at_home() -> bool:
    """Return whether Ray finds a token in HOME that only this user can read."""
    home = os.environ.get("HOME")  # Ray looks there alone.
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
    """Return the process's token of 256 bits, which Ray reads once and keeps."""
    return secrets.token_hex(32)


@contextmanager
def leave_processes_out() -> Iterator[None]:
    """Have Ray start within the block without the processes of LEFT_OUT and dashboard modules.

    With the dashboard's modules, as `ray[default]` has them, the agents start two seconds later and
    keep a core busy meanwhile.
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
    """Have worker_setup.py set up workers: Ray's own file imports Ray twice for each worker."""

    def start(node: Any, *args: object, **kwargs: object) -> None:
        parameters = node._ray_params
        os.environ[worker_setup.RAYS_OWN] = parameters.setup_worker_path
        parameters.setup_worker_path = worker_setup.__file__
        start_raylet(node, *args, **kwargs)

    return start


def _refuse_dashboard() -> ImportError:
    return ImportError("no dashboard is wanted")


def _start_nothing(*args: object, **kwargs: object) -> None: ...
