"""A sandbox for the threads of this process: runs untrusted code, and keeps sessions.

The first program starts a worker, which later programs find warm. A session that nobody uses for a
while is ended. docs/sandbox.md says what the sandbox guarantees and what it does not.
"""

import atexit
import os
import secrets
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from mcore_rl.services.sandbox.execution import CodeRequest, CodeResult, execute
from mcore_rl.services.sandbox.languages import find_languages, readable_paths
from mcore_rl.services.sandbox.limits import Limits, RunVerdict, SandboxError, SandboxFullError
from mcore_rl.services.sandbox.session import NOTEBOOK, BoxSession
from mcore_rl.services.sandbox.worker import Worker, WorkerPool

_SWEEP_S = 1.0


class Sessions:
    """At most `max_sessions` sessions, each with a worker of its own.

    paths    folders and files of the machine that programs may read
    idle_s   seconds after its last call after which a session ends
    """

    def __init__(
        self,
        paths: Sequence[str],
        max_sessions: int,
        idle_s: float,
        use_cgroups: bool = True,
        bubblewrap: bool = False,
    ) -> None:
        if max_sessions < 0 or not idle_s > 0:
            raise ValueError(
                f"max_sessions={max_sessions}, idle_s={idle_s}: at least 0, and more than 0"
            )
        self._paths = [*paths, NOTEBOOK]
        self._max_sessions = max_sessions
        self._idle_s = idle_s
        self._use_cgroups = use_cgroups
        self._bubblewrap = bubblewrap
        self._sessions: dict[str, tuple[BoxSession, Worker]] = {}
        self._num_opening = 0
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        threading.Thread(target=self._sweep, name="sandbox sessions", daemon=True).start()

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, kind: str, limits: Limits, files: Mapping[str, bytes] | None = None) -> str:
        """Start a session and return its name; SandboxFullError if there are too many."""
        with self._lock:
            if len(self._sessions) + self._num_opening >= self._max_sessions:
                raise SandboxFullError(
                    f"all {self._max_sessions} sessions of the sandbox are open: close one, wait"
                    f" until one was idle for {self._idle_s:g} s, or allow more"
                )
            self._num_opening += 1
        try:
            worker = Worker(self._paths, self._use_cgroups, self._bubblewrap)
            try:
                session = BoxSession(worker, kind, limits, files)
            except BaseException:
                worker.close()
                raise
            name = secrets.token_urlsafe(16)
            with self._lock:
                self._sessions[name] = (session, worker)
            return name
        finally:
            with self._lock:
                self._num_opening -= 1

    def find(self, name: str) -> BoxSession:
        """Return a session; ValueError if there is none of this name, or no longer."""
        with self._lock:
            if name not in self._sessions:
                raise ValueError(
                    f"session={name[:64]!r}: no such session; one ends after {self._idle_s:g} s"
                    " without a call, so open another, with a snapshot's files if need be"
                )
            return self._sessions[name][0]

    def close(self, name: str) -> None:
        """End a session; ValueError if there is none of this name."""
        self.find(name)
        with self._lock:
            found = self._sessions.pop(name, None)
        if found is not None:
            _end(*found)

    def close_all(self) -> None:
        self._is_closed.set()
        with self._lock:
            found = list(self._sessions.values())
            self._sessions.clear()
        for session, worker in found:
            _end(session, worker)

    def _sweep(self) -> None:
        while not self._is_closed.wait(min(_SWEEP_S, self._idle_s / 2)):
            now = time.monotonic()
            with self._lock:
                idle = [
                    name
                    for name, (session, _) in self._sessions.items()
                    if now - session.last_used > self._idle_s and not session.is_busy
                ]
                found = [self._sessions.pop(name) for name in idle]
            for session, worker in found:
                _end(session, worker)


def _end(session: BoxSession, worker: Worker) -> None:
    worker.retire()  # first, so that a call that still runs ends at once
    try:
        session.close()
    except SandboxError:
        pass
    finally:
        worker.close()


@dataclass(frozen=True)
class SandboxOptions:
    """How a sandbox is made.

    workers          executions at a time
    max_waiting      requests that may wait for a worker; further ones are refused
    limits           of a request that names none
    max_memory_mib   the most memory that a request may ask for
    max_sessions     open sessions at a time, each with a worker of its own
    idle_s           seconds without a call after which a session ends
    session_s        the longest life of a session, in seconds
    use_cgroups      bound the processes of a program together, where that is possible
    bubblewrap       run the wardens in bubblewrap, as a layer around their own
    """

    workers: int = field(default_factory=lambda: os.cpu_count() or 1)
    max_waiting: int = 256
    limits: Limits = field(default_factory=Limits)
    max_memory_mib: int = 8192
    max_sessions: int = 16
    idle_s: float = 600.0
    session_s: float = 3600.0
    use_cgroups: bool = True
    bubblewrap: bool = False

    def __post_init__(self) -> None:
        for name in ("workers", "idle_s", "session_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be greater than 0")
        for name in ("max_waiting", "max_sessions"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 0")
        if self.max_memory_mib < self.limits.memory_mib:
            raise ValueError(
                f"max_memory_mib={self.max_memory_mib} is less than the default of a request,"
                f" memory_mib={self.limits.memory_mib}"
            )


class Sandbox:
    """Runs code in this machine's sandbox; all methods may be called from several threads."""

    def __init__(self, options: SandboxOptions | None = None) -> None:
        self.options = options or SandboxOptions()
        self.languages = find_languages()
        paths = readable_paths(self.languages)
        options = self.options
        layers = (options.use_cgroups, options.bubblewrap)
        self._pool = WorkerPool(paths, options.workers, options.max_waiting, *layers)
        self.sessions = Sessions(paths, options.max_sessions, options.idle_s, *layers)

    def warm_up(self) -> None:
        """Start all workers; SandboxError if this machine allows no sandbox."""
        self._pool.warm_up()

    def run_code(self, request: CodeRequest) -> CodeResult:
        """Run a request.

        Raises ValueError for a language that is not there and for files that do not fit, and
        SandboxFullError if the queue is full. Other failures have the verdict sandbox_error.
        """
        return execute(self._pool, self.languages, request)

    def open_session(
        self, kind: str, limits: Limits | None = None, files: Mapping[str, bytes] | None = None
    ) -> tuple[str, BoxSession]:
        """Open a notebook ("python") or a shell ("bash"); return its name and the session."""
        name = self.sessions.open(kind, limits or self.session_limits(self.options.limits), files)
        return name, self.sessions.find(name)

    def session_limits(self, limits: Limits) -> Limits:
        """Return the limits of a whole session whose calls have `limits`."""
        return replace(limits, wall_s=self.options.session_s, cpu_s=int(self.options.session_s))

    def health(self) -> dict[str, Any]:
        """Return the languages, and how many workers and sessions there are."""
        return {
            "languages": sorted(self.languages),
            "workers": self.options.workers,
            "sessions": len(self.sessions),
            **self._pool.counts(),
        }

    def list_programs(self) -> dict[str, str]:
        """Return the program that compiles or runs each language."""
        return {
            name: (language.compile or language.run or (sys.executable,))[0]
            for name, language in self.languages.items()
        }

    def has_cgroups(self) -> bool:
        """Return whether cgroups bound the processes of a program together, once warmed up."""
        return self._pool.has_cgroups()

    def close(self) -> None:
        """End all workers and sessions."""
        self.sessions.close_all()
        self._pool.close()


__all__ = ["Limits", "Outcome", "SandboxError", "run_code", "run_program"]
_ENDLESS = 1 << 30
"""Threads of this process may all wait for a worker: nobody else sends requests."""
_lock = threading.Lock()


@dataclass(frozen=True)
class Outcome:
    """How a program ended. `killed` names the limit that ended it, or is empty.

    `status` is its exit status, or 128 + signal. Output beyond the limit is cut off.
    """

    status: int
    stdout: str
    stderr: str
    killed: str = ""


def run_program(source: str, stdin: str = "", limits: Limits | None = None) -> Outcome:
    """Run a Python program in a sandbox.

    Raises SandboxError if this machine allows none: a program never runs outside of one.
    """
    result = run_code(CodeRequest(source, stdin=stdin, limits=limits or Limits()))
    ran = result.ran
    if result.verdict == RunVerdict.SANDBOX_ERROR or ran is None:
        raise SandboxError(result.message)
    out, err = (text.decode(errors="replace") for text in (ran.stdout, ran.stderr))
    return Outcome(ran.status, out, err, ran.killed)


def run_code(request: CodeRequest) -> CodeResult:
    """Run a request in any language of this machine.

    Raises ValueError for a language that is not there and for files that do not fit. Every failure
    of the sandbox is a result with verdict sandbox_error.
    """
    with _lock:
        sandbox = _sandbox_of(os.getpid())
    return sandbox.run_code(request)


@lru_cache
def _sandbox_of(pid: int) -> Sandbox:
    """Return the sandbox of this process; a fork must not use that of its parent."""
    sandbox = Sandbox(SandboxOptions(max_waiting=_ENDLESS))
    atexit.register(_close, sandbox, pid)
    return sandbox


def _close(sandbox: Sandbox, pid: int) -> None:
    if pid == os.getpid():
        sandbox.close()
