"""Starts or joins Ray for the length of a run, and leaves no process behind."""

import logging
import math
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil
import ray
import ray._private.worker
from ray._private import ray_constants
from ray.job_config import JobConfig

from mcore_rl.cluster import watchdog
from mcore_rl.cluster.environment import select_worker_variables, set_defaults
from mcore_rl.cluster.local_ray import keep_own_token, leave_processes_out
from mcore_rl.cluster.nodes import wait_for_nodes
from mcore_rl.cluster.process_tags import OPEN, ignore_interrupts, make_ray_temp_dir, tag_processes
from mcore_rl.config import ClusterConfig
from mcore_rl.device import has_cuda
from mcore_rl.process.process_state import describe_state
from mcore_rl.process.signals import handle_outside_forks
from mcore_rl.process.variables import set_variables

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


class SafeJob(JobConfig):
    """A job of Ray whose workers do not have the controller's folders first on their path.

    Just before it serializes a job, Ray puts the controller's working folder and the folder of its
    script before the standard library. A RankActor puts the working folder last; no other worker
    runs the user's code.
    """

    def _serialize(self) -> str:
        self._py_driver_sys_path.clear()
        return super()._serialize()


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
    set_defaults()
    ray._private.worker._worker_logs_enabled = False  # Only RankError reports a rank's death.
    if config.address is not None:
        with _shut_down():
            _join(config.address)
            if config.num_nodes > 1:
                wait_for_nodes(config.num_nodes, startup_timeout_s)
            yield
        return
    with (
        _exit_if_ray_is_lost(),
        make_ray_temp_dir() as temp_dir,
        tag_processes(str(temp_dir)),
        _keep_ray_on_loopback(),
        keep_own_token(temp_dir),
        _shut_down(temp_dir),
    ):
        _start(config, num_cpus, temp_dir)
        yield


class RayLostError(SystemExit):
    """A process of Ray died that this process had started, and with it the ranks.

    The error derives from SystemExit so that nothing catches it: any further call to Ray would
    hang.
    """


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
        if child.status() == psutil.STATUS_ZOMBIE and child.name() in watchdog.RAY_PROCESSES:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            raise RayLostError(watchdog.describe_lost_ray(child.name()))


@contextmanager
def _keep_ray_on_loopback() -> Iterator[None]:
    """Have a Ray that this process starts listen on loopback only, as on macOS and Windows.

    On Linux, Ray replaces 127.0.0.1 by the machine's outward address, and Ray's servers then listen
    on all interfaces.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    # For the processes that Ray starts; tag_processes restores the environment.
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
    """Have SIGTERM exit with status 143; Ray's own handler would exit with 15."""

    def exit_with_signal(signum: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + signum)

    handle_outside_forks(signal.SIGTERM, exit_with_signal)
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
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
