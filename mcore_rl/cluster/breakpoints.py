"""Stops a process of a run at breakpoint() until a debugger attaches, and says how to attach.

                     RAY_DEBUG=legacy, the default          RAY_DEBUG=1
rank                 pdb behind a port, for `ray debug`     debugpy, for VS Code
controller           the same; on a terminal, pdb there     debugpy
other processes      refused: no debugger finds them

`name_breakpoints` prints on the controller's terminal which ranks wait; otherwise only their logs
say so.
"""

import builtins
import importlib
import importlib.util
import json
import logging
import os
import pdb
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import ray
import ray._private.worker
import ray.util.debugpy
from ray._private import ray_constants
from ray._raylet import getproctitle  # type: ignore[attr-defined]
from ray.exceptions import RayError
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
)
from ray.util import rpdb

from mcore_rl.process.variables import set_variables

_log = logging.getLogger(__name__)

NAMESPACE = "mcore_rl"
"""Namespace in Ray's key-value store that says of each open breakpoint how to attach."""
_VARIABLE = "PYTHONBREAKPOINT"
_HOOK = f"{__name__}.stop"
_HOST = "127.0.0.1"


_sessions = threading.local()
INTERVAL_S = 1.0
_END_S = 5.0


class _Patience:
    """How long this process waits for a debugger."""

    wait_s: float | None = None
    """Seconds; None: until the rank's call is overdue and the controller kills the rank."""
    is_over = False
    """Nobody attached at an earlier breakpoint, so all later ones are skipped."""


_patience = _Patience()


class _RemotePdb(rpdb._RemotePdb):
    """Ray's pdb behind a port; the process goes on once its client disconnects."""

    def accept(self, wait_s: float | None) -> None:
        """Wait for a client. Raises TimeoutError after `wait_s`."""
        self._listen_socket.settimeout(wait_s)
        try:
            self.listen()
        finally:
            self._listen_socket.close()
        self.nosigint = True  # Otherwise pdb takes Ctrl-C from the controller for good.

    @property
    def port(self) -> int:
        return self._listen_socket.getsockname()[1]

    @property
    def is_open(self) -> bool:
        return not self.handle.stream.closed

    def do_EOF(self, arg: str) -> Any:
        return self.do_continue(arg)

    def cmdloop(self, intro: Any = None) -> None:
        try:
            super().cmdloop(intro)
        except OSError:  # the connection, as pdb itself reports what typed commands raise
            self.do_continue("")

    def message(self, msg: str) -> None:
        with suppress(OSError):
            super().message(msg)


def answer_in_rank() -> None:
    """Install `stop` as breakpoint() of this rank; Ray's hook does not say how to attach."""
    os.environ[_VARIABLE] = _HOOK


@contextmanager
def answer_in_controller(wait_s: float) -> Iterator[None]:
    """Have breakpoint() in the block stop this process, a Ray driver.

    Without a terminal, a breakpoint waits `wait_s` for a debugger. If no debugger attaches, the
    process goes on and ignores all further breakpoints: an unattended run must not stop forever.
    """
    _patience.wait_s = wait_s
    _patience.is_over = False
    try:
        with set_variables({_VARIABLE: _HOOK}):
            yield
    finally:
        _patience.wait_s = None


def stop() -> None:
    """Stop the frame that calls breakpoint().

    Raises RuntimeError where no debugger could attach: in a process that Ray did not start, such as
    a worker of reward.workers, and with RAY_DEBUG=1 where debugpy is not installed.
    """
    frame = sys._getframe(1)
    if not ray.is_initialized():
        raise RuntimeError(
            f"breakpoint() at {_place(frame)}: no debugger can attach to process {os.getpid()},"
            " which is none of Ray's. In a reward function, set run.debug=true or"
            " reward.workers=0"
        )
    if _patience.is_over:
        return
    mode = os.environ.get("RAY_DEBUG", "1")
    if mode == "1":
        _stop_for_debugpy(frame)
    elif mode == "legacy" and _is_controller() and _has_terminal():
        pdb.Pdb(nosigint=True).set_trace(frame)
    elif mode == "legacy":
        _stop_for_ray_debug(frame)


def _stop_for_ray_debug(frame: FrameType) -> None:
    last: _RemotePdb | None = getattr(_sessions, "last", None)
    if last is not None and last.is_open:  # a client that steps came upon another breakpoint()
        last.set_trace(frame)
        return
    breakpoint_id = uuid.uuid4().hex
    session = _RemotePdb(breakpoint_id, _HOST, 0, "localhost", quiet=True)
    key = f"RAY_PDB_{breakpoint_id}"
    described = json.dumps(_describe_for_ray_debug(frame, session.port))
    _internal_kv_put(key, described, namespace=ray_constants.KV_NAMESPACE_PDB)
    how = f"{_ray_debug()} on {socket.gethostname()}, or there: nc {_HOST} {session.port}"
    try:
        with _announce(frame, how):
            session.accept(_patience.wait_s)
    except TimeoutError:
        _give_up(frame)
        return
    finally:
        _internal_kv_del(key, namespace=ray_constants.KV_NAMESPACE_PDB)
    _sessions.last = session
    session.set_trace(frame)


def _stop_for_debugpy(frame: FrameType) -> None:
    if importlib.util.find_spec("debugpy") is None:
        raise RuntimeError(
            f"breakpoint() at {_place(frame)} with RAY_DEBUG=1 needs debugpy: install it in"
            f" {sys.prefix}, or unset RAY_DEBUG for `ray debug`"
        )
    import debugpy

    if debugpy.is_client_connected():
        _stop_in_pydevd(frame)
        return
    worker = ray._private.worker.global_worker
    ray.util.debugpy._ensure_debugger_port_open_thread_safe()
    sys.breakpointhook = builtins.breakpoint = stop  # debugpy had installed its own hook.
    how = f"VS Code, or by debugpy's protocol at {worker.node_ip_address}:{worker.debugger_port}"
    is_late = threading.Event()

    def cancel() -> None:
        is_late.set()
        debugpy.wait_for_client.cancel()  # type: ignore[attr-defined]

    deadline = threading.Timer(_patience.wait_s or threading.TIMEOUT_MAX, cancel)
    deadline.daemon = True
    deadline.start()
    with worker.worker_paused_by_debugger(), _announce(frame, how):
        debugpy.wait_for_client()
    deadline.cancel()
    if is_late.is_set():
        _give_up(frame)
    else:
        _stop_in_pydevd(frame)


def _stop_in_pydevd(frame: FrameType) -> None:
    importlib.import_module("pydevd").settrace(stop_at_frame=frame)  # debugpy's own copy of pydevd


def open_prefix() -> str:
    """Return the prefix of this run's keys, since several runs may share one Ray."""
    return f"breakpoint_{ray.get_runtime_context().get_job_id()}_"


@contextmanager
def _announce(frame: FrameType, how: str) -> Iterator[None]:
    """Announce a waiting breakpoint in the log and, during the block, in Ray's store."""
    who = getproctitle() if not _is_controller() else "the controller"
    text = f"breakpoint() in {who} at {_place(frame)} waits for {how}"
    _log.warning(text)
    if _is_controller():
        print(f"mcore-rl: {text}", file=sys.stderr, flush=True)
        yield
        return
    key = f"{open_prefix()}{uuid.uuid4().hex}"
    _internal_kv_put(key, text, namespace=NAMESPACE)
    try:
        yield
    finally:
        _internal_kv_del(key, namespace=NAMESPACE)


def _give_up(frame: FrameType) -> None:
    _patience.is_over = True
    text = (
        f"no debugger came to the breakpoint() at {_place(frame)} within {_patience.wait_s:g} s"
        " (run.call_timeout_s): the run goes on, and passes over all further ones in this process"
    )
    _log.warning(text)
    print(f"mcore-rl: {text}", file=sys.stderr, flush=True)


def _describe_for_ray_debug(frame: FrameType, port: int) -> dict[str, Any]:
    """Return the fields that `ray debug` reads about a breakpoint (ray/util/rpdb.py)."""
    context = ray.get_runtime_context()
    return {
        "proctitle": getproctitle(),
        "pdb_address": f"localhost:{port}",
        "filename": frame.f_code.co_filename,
        "lineno": frame.f_lineno,
        "traceback": "NoneType: None\n",
        "timestamp": time.time(),
        "job_id": context.get_job_id(),
        "node_id": context.get_node_id(),
        "worker_id": context.get_worker_id(),
        "actor_id": context.get_actor_id(),
        "task_id": context.get_task_id(),
    }


def _ray_debug() -> str:
    """Return the command that attaches, with the variables that reach this Ray."""
    # Without the last variable `ray debug` replaces a loopback address by the outward one.
    on_loopback = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", on_loopback)
    variables = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    address = ray.get_runtime_context().gcs_address
    return " ".join([*variables, "RAY_DEBUG=legacy ray debug", f"--address={address}"])


def _is_controller() -> bool:
    return ray._private.worker.global_worker.mode == ray.SCRIPT_MODE


def _has_terminal() -> bool:
    """Return whether pdb can read from a terminal; a command in the background must not read."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):
        return False


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@contextmanager
def name_breakpoints() -> Iterator[None]:
    """While the block runs, print and log each rank that begins to wait for a debugger."""
    is_over = threading.Event()
    thread = threading.Thread(target=_watch, args=(is_over,), name="breakpoints", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(_END_S)


def _watch(is_over: threading.Event) -> None:
    """Print new breakpoints until `is_over`, or until Ray is gone."""
    prefix = open_prefix()
    told: set[bytes] = set()
    while not is_over.wait(INTERVAL_S) and ray.is_initialized():
        try:
            for key in _internal_kv_list(prefix, namespace=NAMESPACE):
                text = _internal_kv_get(key, namespace=NAMESPACE)
                if text and key not in told:
                    told.add(key)
                    _log.warning(text.decode())
                    print(f"mcore-rl: {text.decode()}", file=sys.stderr, flush=True)
        except RayError:
            return
