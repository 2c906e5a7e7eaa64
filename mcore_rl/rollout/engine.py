"""Starts one SGLang server and waits until it is healthy.

The server is forked from a process that has imported SGLang, or started anew. The kernel, or the
process that forked the server, kills it together with the process that started it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import psutil

from mcore_rl.process.folders import TempDir, find_compile_caches
from mcore_rl.process.fork_request import ForkedProcess, fork_child
from mcore_rl.process.log_files import read_tail
from mcore_rl.process.network import (
    bypass_proxies,
    find_free_port,
    find_loopback_interfaces,
    open_directly,
    restrict_zmq_peers,
)
from mcore_rl.process.server_keys import KEYS_FD, ServerKeys, bearer, pass_to_child
from mcore_rl.rollout.engine_spec import UNCOMPILED, EngineAddress, EngineSpec

FORKS = "MCORE_RL_ENGINE_FORKS"
"""The variable that names the socket of the process that forks servers (cpu/engine_forks.py)."""
SERVER = ["-P", "-m", "mcore_rl.rollout.server"]


_HEALTH_POLL_S = 0.1
_FREEZE_TIMEOUT_S = 10.0
_KILL_TIMEOUT_S = 10.0


class ServerProcess:
    """Runs mcore_rl.rollout.server with `arguments`, in a process group of its own.

    log   file of its output
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        keys: ServerKeys | None,
        log: BinaryIO,
    ) -> None:
        self._exit_status: int | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        with pass_to_child(keys) as keys_fd:
            fork = _fork(arguments, environment, keys_fd, log)
            if fork is None:
                self._start(arguments, environment, keys_fd, log)
            else:
                self.pid = fork.pid
                self._waiting = threading.Thread(target=self._wait, args=(fork,), daemon=True)
                self._waiting.start()

    def _start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        keys_fd: int | None,
        log: BinaryIO,
    ) -> None:
        """Start it in a separate thread, which waits for its end: the kernel kills the child
        together with the thread that started it (see process/parent_death.py).
        """
        command = [sys.executable, *SERVER, "--parent-pid", str(os.getpid())]
        if keys_fd is not None:
            command += [KEYS_FD, str(keys_fd)]
        started: Future[subprocess.Popen[bytes]] = Future()

        def start_and_wait() -> None:
            try:
                process = subprocess.Popen(
                    [*command, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=() if keys_fd is None else (keys_fd,),
                    env=environment,
                )
            except OSError as error:
                started.set_exception(error)
                return
            started.set_result(process)
            process.wait()

        self._waiting = threading.Thread(target=start_and_wait, daemon=True)
        self._waiting.start()
        self._popen = started.result()
        self.pid = self._popen.pid

    def _wait(self, fork: ForkedProcess) -> None:
        self._exit_status = fork.wait()

    @property
    def exit_status(self) -> int | None:
        """The server's exit code, or minus the signal that killed it; None while it runs.

        Of a child it asks the kernel, since the thread that waits may not have woken yet.
        """
        if self._popen is None:
            return self._exit_status
        if self._popen.returncode is not None:
            return self._popen.returncode
        with contextlib.suppress(ChildProcessError):  # the waiting thread has reaped it already
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return None
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        self._waiting.join()
        return self._popen.returncode

    def kill(self) -> None:
        """Kill its process group, if it is still there, without waiting."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def join(self, timeout_s: float) -> None:
        """Wait until the end has been noticed."""
        self._waiting.join(timeout_s)


def can_be_forked(arguments: Sequence[str]) -> bool:
    """Return whether a server with these arguments has imported what any other has."""
    return UNCOMPILED not in arguments


def _fork(
    arguments: Sequence[str], environment: Mapping[str, str], keys_fd: int | None, log: BinaryIO
) -> ForkedProcess | None:
    """Return the server's process if one that has imported SGLang forks it, otherwise None."""
    path = os.environ.get(FORKS)
    if path is None or not can_be_forked(arguments):
        return None
    with open(os.devnull, "rb") as nothing:
        streams = [nothing.fileno(), log.fileno(), log.fileno()]
        others = [] if keys_fd is None else [keys_fd]
        return fork_child(path, [*SERVER, *arguments], environment, streams, others)


class EngineProcess:
    """Starts, checks and stops one server; as a context manager, waits until it is healthy."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec if spec.port is not None else replace(spec, port=find_free_port(spec.host))
        self.url = f"http://{self.spec.host}:{self.spec.port}"
        self._process: ServerProcess | None = None
        self._temp_dir: TempDir | None = None

    def __enter__(self) -> "EngineProcess":
        self.start()
        self.wait_healthy()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None, f"engine {self.url} was not started"
        return self._process.pid

    @property
    def address(self) -> EngineAddress:
        return EngineAddress(self.url, self.spec.log_path, self.spec.keys)

    @property
    def name(self) -> str:
        """The engine's name in messages."""
        return f"engine {self.url} (log {self.spec.log_path})"

    def start(self) -> None:
        """Start the server and return at once."""
        assert self._process is None, f"{self.name} was started before"
        Path(self.spec.log_path).parent.mkdir(parents=True, exist_ok=True)
        self._temp_dir = TempDir()
        with open(self.spec.log_path, "ab") as log:
            self._process = ServerProcess(
                self.spec.arguments(),
                make_environment(self.spec, self._temp_dir.path),
                self.spec.keys,
                log,
            )

    def wait_healthy(self, timeout_s: float = 240.0) -> None:
        """Return once the server is healthy.

        Raises RuntimeError if it exits before that and TimeoutError after `timeout_s`, both with
        the log's last lines and after stopping the engine.
        """
        deadline = time.monotonic() + timeout_s
        while not self.is_healthy():
            if not self.is_alive():
                self.stop()
                raise RuntimeError(
                    f"{self.name} exited with status {self.exit_status} while starting;"
                    f" its last lines:\n{self.tail()}"
                )
            if time.monotonic() > deadline:
                self.stop()
                raise TimeoutError(
                    f"waited {timeout_s:.0f} s for {self.name} to become healthy;"
                    f" its last lines:\n{self.tail()}"
                )
            time.sleep(_HEALTH_POLL_S)
        self._freeze_objects()

    def _freeze_objects(self) -> None:
        """Keep what the server's processes have made so far from their garbage collectors.

        SGLang asks itself for that where it warms up, and too early where it does not.
        """
        with contextlib.suppress(OSError):  # further servers only tell their health
            self._post("/freeze_gc", b"", _FREEZE_TIMEOUT_S)

    def end_requests(self, timeout_s: float) -> None:
        """End all requests, and a pause of generation. Raises OSError if that fails."""
        self._post("/abort_request", b'{"abort_all": true}', timeout_s)
        self._post("/continue_generation", b"{}", timeout_s)

    def _post(self, path: str, body: bytes, timeout_s: float) -> None:
        headers = {} if self.spec.keys is None else bearer(self.spec.keys.admin)
        if body:
            headers["Content-Type"] = "application/json"
        request = urllib.request.Request(self.url + path, body, headers)
        open_directly(request, timeout_s).close()

    def is_healthy(self) -> bool:
        try:
            with open_directly(f"{self.url}/health", 5.0) as response:
                return response.status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def is_alive(self) -> bool:
        return self._process is not None and self.exit_status is None

    @property
    def exit_status(self) -> int | None:
        """The server's exit code, or minus the signal that killed it; None while it runs."""
        return None if self._process is None else self._process.exit_status

    def tail(self, num_lines: int = 30) -> str:
        """Return the last lines of the log, each with a leading bar."""
        lines = read_tail(Path(self.spec.log_path), num_lines) or ["(no log)"]
        return "\n".join(f"  | {line}" for line in lines)

    def stop(self) -> None:
        """Kill the server and all its processes and wait until they are gone.

        Does nothing if it was stopped already. Raises TimeoutError naming processes that do not
        end.
        """
        # Once the server is stopped, its pid may belong to another process.
        if self._process is None or self._temp_dir is None:
            return
        self._process.kill()
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while left := list(_group_members(self.pid)):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{self.name}: processes {left} are still there {_KILL_TIMEOUT_S} s after"
                    " SIGKILL"
                )
            time.sleep(0.02)
        self._process.join(_KILL_TIMEOUT_S)
        self._temp_dir.remove()
        self._temp_dir = None


def make_environment(spec: EngineSpec, temp_dir: str) -> dict[str, str]:
    """Return the server's environment.

    SGLang leaves files in its temporary folder, so each server gets its own; compile caches are
    shared. Between tokens, the inputs of a delta net's convolution are kept in the engine's dtype;
    SGLang would round them to bfloat16. Indexers report positions of keys; SGLang's fused kernels
    would report slots of the KV cache.
    """
    environment = {**os.environ, "TMPDIR": temp_dir, "PYTHONUNBUFFERED": "1"}
    environment.setdefault("SGLANG_MAMBA_CONV_DTYPE", spec.dtype)
    if spec.indexer_topk:
        environment["SGLANG_DSA_FUSE_TOPK"] = "0"
    environment |= bypass_proxies(environment, [spec.host, *spec.node_addresses])
    environment |= find_compile_caches()
    variables = restrict_zmq_peers(spec.host, spec.node_addresses)
    if spec.is_local:
        variables |= find_loopback_interfaces()
    for name, value in variables.items():
        environment.setdefault(name, value)
    return environment


def _group_members(group_id: int) -> Iterator[int]:
    """Yield the process ids of a process group, without zombies."""
    for process in psutil.process_iter(["pid", "status"]):
        with contextlib.suppress(ProcessLookupError):
            is_zombie = process.info["status"] == psutil.STATUS_ZOMBIE
            if os.getpgid(process.pid) == group_id and not is_zombie:
                yield process.pid
