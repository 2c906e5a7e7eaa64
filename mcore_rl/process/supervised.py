"""Supervises an HTTP server: starts a child process, and restarts it at the same address.

    thread: start --> healthy --> dead, stopped, or silent for long --> pause --> start --> ...

The server ends with this process, however this process ends.
"""

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mcore_rl.process.disk import report_full_disk
from mcore_rl.process.log_files import read_tail
from mcore_rl.process.network import open_directly
from mcore_rl.process.process_state import STOPPED, describe_state
from mcore_rl.process.safe_path import safe_module

_log = logging.getLogger(__name__)
_POLL_S = 0.1
_LOOK_EVERY_S = 2.0
_ANSWER_S = 10.0
_STOP_S = 10.0
_STOPPED_S = 5.0
"""A process that is stopped (SIGSTOP) for so long is killed; it would answer nobody."""
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0
_TAIL_LINES = 10


@dataclass(frozen=True)
class SupervisedSpec:
    """A server to start.

    name        name of the server in messages
    command     program and arguments; `--key-file` is added if there is a key
    health_url  answers 200 once the server is ready
    log_path    file for the server's output
    key         key of the server's requests; it reaches the server through a pipe
    silent_s    seconds without an answer after which the server is restarted
    """

    name: str
    command: tuple[str, ...]
    health_url: str
    log_path: Path
    key: str = field(default="", repr=False)
    silent_s: float = 120.0


class SupervisedServer:
    """A server and its supervising thread. `wait_healthy` waits for the first start."""

    def __init__(self, spec: SupervisedSpec) -> None:
        """Start the server in a thread. Raises ValueError if the log cannot be written."""
        self.spec = spec
        # Taken here: a new process that reads the variables of this one while another thread sets
        # some may find no memory where they were, and is not started (EFAULT).
        self._environment = dict(os.environ)
        self.num_restarts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._was_healthy = threading.Event()
        self._has_failed = threading.Event()
        self._why_failed = ""
        self._stopping = threading.Event()
        try:
            with report_full_disk(spec.log_path):
                spec.log_path.parent.mkdir(parents=True, exist_ok=True)
                spec.log_path.touch()
        except OSError as error:
            raise ValueError(f"the log of {spec.name}: {error}") from None
        self._thread = threading.Thread(target=self._supervise, name=spec.name, daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The server's process id; None before its first start."""
        return None if self._process is None else self._process.pid

    def wait_healthy(self, timeout_s: float) -> None:
        """Wait until the server answers.

        Raises RuntimeError if the server ends first, and TimeoutError after `timeout_s`. Both stop
        the server and carry the last lines of its log.
        """
        until_s = time.monotonic() + timeout_s
        while not self._was_healthy.wait(_POLL_S):
            if self._has_failed.is_set():
                self.stop()
                raise RuntimeError(
                    f"{self._describe()} {self._why_failed} at its start:\n{self._read_tail()}"
                )
            if time.monotonic() > until_s:
                self.stop()
                raise TimeoutError(
                    f"waited {timeout_s:g} s for {self._describe()} to answer:\n{self._read_tail()}"
                )

    def is_healthy(self) -> bool:
        """Return whether the server answers now."""
        try:
            with open_directly(self.spec.health_url, _ANSWER_S) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def stop(self) -> None:
        """End the server and wait until it is gone. May be called again."""
        self._stopping.set()
        self._thread.join(3 * _STOP_S)
        if self._thread.is_alive():
            raise TimeoutError(f"waited {3 * _STOP_S:g} s for {self._describe()} to end")

    def _supervise(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._stopping.is_set():
            began_s = time.monotonic()
            # This thread must live as long as the server, which dies with it (see parent_death.py).
            try:
                process = self._process = self._start()
                why = self._watch(process)
                self._end(process)
            except OSError as error:
                why = f"could not be started: {error}"
            if self._stopping.is_set():
                return
            if not self._was_healthy.is_set():
                self._why_failed = why
                self._has_failed.set()
                return
            self.num_restarts += 1
            _log.warning("%s %s; it is started again", self._describe(), why)
            pause_s = _FIRST_PAUSE_S if time.monotonic() - began_s > 60 else 2 * pause_s
            self._stopping.wait(min(pause_s, _LONGEST_PAUSE_S))

    def _watch(self, process: "subprocess.Popen[bytes]") -> str:
        """Return why the server must be restarted, or "" if it is to stop."""
        answered_s = time.monotonic()
        look_s = 0.0
        ran_s = answered_s
        while not self._stopping.wait(_POLL_S):
            if (status := process.poll()) is not None:
                return f"ended with status {status}"
            if describe_state(process.pid) == STOPPED:
                if time.monotonic() - ran_s > _STOPPED_S:
                    return f"was stopped for {_STOPPED_S:g} s"
                continue
            ran_s = time.monotonic()
            if time.monotonic() < look_s:
                continue
            if self.is_healthy():
                self._was_healthy.set()
                answered_s = time.monotonic()
                look_s = answered_s + _LOOK_EVERY_S
            elif time.monotonic() - answered_s > self.spec.silent_s:
                return f"has not answered for {self.spec.silent_s:g} s"
        return ""

    def _start(self) -> "subprocess.Popen[bytes]":
        spec = self.spec
        command = [*safe_module("mcore_rl.process.parent_death"), str(os.getpid()), *spec.command]
        with open(spec.log_path, "ab") as log, _open_key_pipe(spec.key) as descriptor:
            if descriptor is not None:
                command += ["--key-file", f"/dev/fd/{descriptor}"]
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                pass_fds=() if descriptor is None else (descriptor,),
                start_new_session=True,  # Ctrl-C is for the run, which ends its servers in order
            )

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        """End the server and its process group: SIGTERM if the run stops, SIGKILL after _STOP_S."""
        if self._stopping.is_set() and process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(_STOP_S)

    def _describe(self) -> str:
        return f"{self.spec.name} (log {self.spec.log_path})"

    def _read_tail(self) -> str:
        lines = read_tail(self.spec.log_path, _TAIL_LINES)
        return "\n".join(f"  | {line}" for line in lines) or "  | (nothing)"


@contextmanager
def _open_key_pipe(key: str) -> Iterator[int | None]:
    """Yield a descriptor from which a child can read the key once; None if there is no key."""
    if not key:
        yield None
        return
    read_end, write_end = os.pipe()
    try:
        os.write(write_end, key.encode())
        os.close(write_end)
        yield read_end
    finally:
        os.close(read_end)
