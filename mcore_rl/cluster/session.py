"""Ray for the length of a run: started here or joined, and gone afterwards with every process under it."""

import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil
import ray
import ray._private.worker

from mcore_rl.cluster import watchdog
from mcore_rl.config import ClusterConfig
from mcore_rl.device import has_cuda

TEMP_PREFIX = "mcore_rl_ray_"
JOIN_TIMEOUT_S = 10.0
LONGEST_TEMP_ROOT = 20
"""Characters: Ray appends 67 for its sockets, a socket's path may have 107."""
ENVIRONMENT = {
    "RAY_DEBUG": "legacy",  # breakpoint() answers to `ray debug`; "1" is the VS Code extension's
    "RAY_worker_niceness": "0",  # else ranks and engines run at nice 15
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Defaults: what the caller's environment sets is left alone."""


@contextmanager
def ray_session(config: ClusterConfig, num_cpus: float = 0.0) -> Iterator[None]:
    """Ray, joined at `config.address` or started on this machine with room for `num_cpus`.

    Leaving the block by any way (end, exception, Ctrl-C, SIGTERM) ends the ranks and what they started;
    so does killing this process. Main thread only. Raises ValueError if nothing answers at the address.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    ray._private.worker._worker_logs_enabled = False  # a rank's death is told once, by RankError
    if config.address is not None:
        with _shut_down():
            _join(config.address)
            yield
        return
    with _told_if_lost(), _temp_dir() as temp_dir, _marked_processes(str(temp_dir)), _shut_down():
        _start(config, num_cpus, temp_dir)
        yield


class RayLost(SystemExit):
    """A process of the Ray that was started here died, and the ranks with it.

    An exit, because nothing may catch it on the way out: any further call to Ray would wait in vain.
    """


def _start(config: ClusterConfig, num_cpus: float, temp_dir: Path) -> None:
    signal.signal(signal.SIGCHLD, _raise_if_ray_is_lost)
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, math.ceil(num_cpus)),
        object_store_memory=_object_store_mib(config) * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=str(temp_dir),
    )
    _exit_on_sigterm()
    _raise_if_ray_is_lost()


def _object_store_mib(config: ClusterConfig) -> int:
    """The size in the recipe; by default one for the rollouts of a machine with GPUs, or of a laptop."""
    if config.object_store_mib is not None:
        return config.object_store_mib
    return 8192 if has_cuda() else 512


def _raise_if_ray_is_lost(*_: object) -> None:
    """Without this Ray itself would exit in silence when its raylet is gone, a minute after its GCS is."""
    for child in psutil.Process().children():
        if child.status() == psutil.STATUS_ZOMBIE and child.name() in watchdog.RAY_PROCESSES:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            raise RayLost(watchdog.ray_lost(child.name()))


@contextmanager
def _told_if_lost() -> Iterator[None]:
    """The end of this process after RayLost: Ray's own exit handlers would wait a minute for a dead GCS."""
    try:
        yield
    except RayLost as lost:
        print(f"mcore-rl: {lost}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _join(address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():  # Ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=JOIN_TIMEOUT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except OSError as error:
        refused = "InvalidAuthToken" in str(error.__cause__)
        hint = "; it wants a token: set RAY_AUTH_MODE=token" if refused else ""
        raise ValueError(
            f"cluster.address={address}: no Ray answers there ({error}){hint}"
        ) from error
    _exit_on_sigterm()


def _exit_on_sigterm() -> None:
    """Ray's own handler would exit with status 15."""

    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + signum)

    signal.signal(signal.SIGTERM, leave)


@contextmanager
def _shut_down() -> Iterator[None]:
    try:
        yield
    except RayLost:
        raise
    except BaseException:
        _disconnect()
        raise
    _disconnect()


def _disconnect() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with _uninterrupted():
        ray.shutdown()


@contextmanager
def _marked_processes(session: str) -> Iterator[None]:
    """Mark what is started in the block and end it on the way out; a watchdog does if this process dies.

    Temporary files of what is started go to the session's folder and with it; compile caches stay.
    """
    command = [sys.executable, "-I", watchdog.__file__, session, str(os.getpid())]
    guard = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    before = dict(os.environ)
    os.environ[watchdog.MARK] = os.environ["TMPDIR"] = session
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor")
    try:
        yield
    finally:
        with _uninterrupted():
            watchdog.end_session(session)
            guard.kill()
            guard.wait()
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C for the few seconds of an orderly end: a second, impatient one would leave orphans."""
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, interrupt)


@contextmanager
def _temp_dir() -> Iterator[Path]:
    """A folder for Ray's logs and sockets, whose paths must be short."""
    root = Path(tempfile.gettempdir())
    root = root if len(str(root)) <= LONGEST_TEMP_ROOT else Path("/tmp")
    path = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX, dir=root))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
