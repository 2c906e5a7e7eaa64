"""Starts or joins Ray for the length of a run, and leaves no process behind.

On this machine Ray starts with only the processes that a run uses, and with the run's own token:

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
import math
import os
import secrets
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import ray
import ray._private.node
import ray._private.utils
import ray._private.worker
from ray._private import ray_constants
from ray.job_config import JobConfig

from mcore_rl.cluster import watchdog, worker_setup
from mcore_rl.cluster.environment import select_worker_variables, set_defaults
from mcore_rl.cluster.nodes import wait_for_nodes
from mcore_rl.cluster.process_tags import OPEN, ignore_interrupts, make_ray_temp_dir, tag_processes
from mcore_rl.config import ClusterConfig
from mcore_rl.device import has_cuda
from mcore_rl.process import relaunch
from mcore_rl.process.process_state import describe_state
from mcore_rl.process.signals import handle_outside_forks, terminate
from mcore_rl.process.variables import restore_variables, set_variables

_log = logging.getLogger(__name__)
JOIN_TIMEOUT_S = 10.0
JOIN_TRIES = 2
SHUTDOWN_S = 30.0
"""Deadline of Ray's own shutdown, which waits forever for its GCS (global control service)."""
_TRIES = "RAY_gcs_server_port_wait_time_s"
"""Variable with the number of Ray's tries to connect, one a second (ray/_private/node.py)."""
TOKEN_HINT = (
    "it wants another token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file with the"
    " cluster's (by default ~/.ray/auth_token)"
)
_BY_USER = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_PATH = "RAY_AUTH_TOKEN_PATH"
LEFT_OUT = ("start_api_server", "start_log_monitor", "start_monitor")
"""Methods of Ray's Node; each starts a process that only the other left-out processes need."""


class SafeJob(JobConfig):
    """A job of Ray whose workers do not have the controller's folders first on their path.

    Just before it serializes a job, Ray puts the controller's working folder and the folder of its
    script before the standard library. A RankActor puts the working folder last; no other worker
    runs the user's code.
    """

    def _serialize(self) -> str:
        self._py_driver_sys_path.clear()
        return super()._serialize()


class RayLostError(SystemExit):
    """A process died that owned the ranks: one of Ray's, or the holder of the run.

    The error derives from SystemExit so that nothing catches it: any further call to Ray would
    hang.
    """


@contextmanager
def open_ray_session(
    config: ClusterConfig, num_cpus: float = 0.0, startup_timeout_s: float = 240.0
) -> Iterator[None]:
    """Join Ray at `config.address`, or start it on this machine with room for `num_cpus`.

    However the block ends (normally, by an exception, Ctrl-C or SIGTERM), the ranks and their child
    processes end, too; they also end if this process is killed. Call this in the main thread.
    Raises ValueError if no Ray answers at the address, or if nodes are missing after
    `startup_timeout_s`.
    """
    set_defaults(several_hosts=config.address is not None)
    ray._private.worker._worker_logs_enabled = False  # Only RankError reports a rank's death.
    if config.address is not None:
        with _exit_if_ray_is_lost(), _shut_down():
            _join(config.address)
            if config.num_nodes > 1:
                wait_for_nodes(config.num_nodes, startup_timeout_s)
            yield
        return
    with (
        restore_variables(),  # not where Ray is lost, whose threads go on reading them
        _exit_if_ray_is_lost(),
        make_ray_temp_dir() as temp_dir,
        tag_processes(str(temp_dir)),
        _keep_ray_on_loopback(),
        keep_own_token(temp_dir),
        _shut_down(temp_dir),
    ):
        _start(config, num_cpus, temp_dir)
        yield


def _start(config: ClusterConfig, num_cpus: float, temp_dir: Path) -> None:
    if config.dashboard:
        _refuse_open_dashboard()
    handle_outside_forks(signal.SIGCHLD, _raise_if_ray_is_lost)
    with nullcontext() if config.dashboard else leave_processes_out():
        started = _init(config, num_cpus, temp_dir)
    _exit_on_sigterm()
    _raise_if_ray_is_lost()
    if config.dashboard:
        _name_dashboard(started.dashboard_url)


def _init(config: ClusterConfig, num_cpus: float, temp_dir: Path) -> Any:
    return ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, math.ceil(num_cpus)),
        object_store_memory=_choose_object_store_mib(config) * 2**20,
        include_dashboard=config.dashboard,
        dashboard_host="127.0.0.1",
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=str(temp_dir / OPEN),
        job_config=SafeJob(),
    )


def _refuse_open_dashboard() -> None:
    """Raise ValueError if a dashboard needs no token, since it lets anyone run any program."""
    if os.environ.get("RAY_AUTH_MODE") == "disabled":
        raise ValueError(
            "cluster.dashboard=true with RAY_AUTH_MODE=disabled: every user of this machine could"
            " run programs through the dashboard; unset RAY_AUTH_MODE"
        )


def _name_dashboard(url: str | None) -> None:
    token = os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")
    text = f"Ray's dashboard is at http://{url}, for those who have the token in {token}"
    _log.info(text)
    print(f"mcore-rl: {text}", file=sys.stderr)


def _choose_object_store_mib(config: ClusterConfig) -> int:
    """Return the recipe's size; by default 8192 MiB on a machine with GPUs, else 512 MiB."""
    if config.object_store_mib is not None:
        return config.object_store_mib
    return 8192 if has_cuda() else 512


def _raise_if_ray_is_lost(*_: object) -> None:
    """Raise RayLostError if a Ray process has ended.

    Ray itself would exit silently once its raylet is gone, and a minute after its GCS (global
    control service) is gone.
    """
    for child in psutil.Process().children():
        try:
            status, name = child.status(), child.name()
        except psutil.NoSuchProcess:
            continue  # Another thread has just waited for it.
        if status == psutil.STATUS_ZOMBIE and name in watchdog.RAY_PROCESSES:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            raise RayLostError(watchdog.describe_lost_ray(name) + relaunch.choose_hint())


@contextmanager
def _keep_ray_on_loopback() -> Iterator[None]:
    """Have a Ray that this process starts listen on loopback only, as on macOS and Windows.

    On Linux, Ray replaces 127.0.0.1 by the machine's outward address, and Ray's servers then listen
    on all interfaces.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    # For the processes that Ray starts.
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _exit_if_ray_is_lost() -> Iterator[None]:
    """Print RayLostError and exit at once.

    Ray's exit handlers would wait a minute for a dead GCS.
    """
    try:
        yield
    except RayLostError as lost:
        print(f"mcore-rl: {lost}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _join(address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():
            # Ray itself would try for minutes.
            socket.create_connection((host.strip("[]"), int(port)), timeout=JOIN_TIMEOUT_S).close()
        with _limit_tries():
            ray.init(
                address=address,
                runtime_env={"env_vars": select_worker_variables()},
                job_config=SafeJob(),
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except OSError as error:
        refused = "InvalidAuthToken" in str(error.__cause__)
        hint = f"; {TOKEN_HINT}" if refused else ""
        raise ValueError(
            f"cluster.address={address}: no Ray answers there ({error}){hint}"
        ) from error
    _exit_on_sigterm()


@contextmanager
def _limit_tries() -> Iterator[None]:
    """Have Ray give up on a head after JOIN_TRIES seconds instead of 20.

    The head's port answers already, so further tries would be refused as well.
    """
    with set_variables({_TRIES: os.environ.get(_TRIES) or str(JOIN_TRIES)}):
        yield


def _exit_on_sigterm() -> None:
    """Have SIGTERM end the process as `terminate` says; Ray's own handler would exit with 15."""
    handle_outside_forks(signal.SIGTERM, terminate)
    # Repeated, because Ray and its imports have registered callbacks of forks by now.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        handle_outside_forks(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _shut_down(session: Path | None = None) -> Iterator[None]:
    """Disconnect from Ray after the block; `session`: the folder of a Ray started here."""
    try:
        yield
    except RayLostError:
        raise
    except BaseException:
        _disconnect(session)
        raise
    _disconnect(session)


def _disconnect(session: Path | None) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with ignore_interrupts(), _exit_after(SHUTDOWN_S, session):
        ray.shutdown()


@contextmanager
def _exit_after(seconds: float, session: Path | None) -> Iterator[None]:
    """Kill the session's processes and exit if the block takes longer than `seconds`.

    The block does so when the GCS is gone.
    """
    timer = threading.Timer(seconds, _kill_all, [seconds, session])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _kill_all(seconds: float, session: Path | None) -> None:
    states = {
        name: describe_state(pid) for name, pid in watchdog.find_ray_children(os.getpid()).items()
    }
    why = "".join(f"; {name} {state}" for name, state in states.items() if state)
    told = f"Ray did not shut down within {seconds:g} s{why}: its processes are killed"
    print(f"mcore-rl: {told}", file=sys.stderr)
    if session is not None:
        for child in psutil.Process().children():
            if (
                watchdog.__file__ in child.cmdline()
            ):  # The watchdog would report the deaths that follow.
                child.kill()
        watchdog.end_session(str(session))
        shutil.rmtree(session, ignore_errors=True)
    relaunch.note_end()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


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
