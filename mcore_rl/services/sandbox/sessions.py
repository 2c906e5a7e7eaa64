"""Keeps the sessions of a service by their names, and ends those that nobody used for a while."""

import secrets
import threading
import time
from collections.abc import Mapping, Sequence

from mcore_rl.services.sandbox.limits import Limits, SandboxError, SandboxFull
from mcore_rl.services.sandbox.session import NOTEBOOK, BoxSession
from mcore_rl.services.sandbox.worker import Worker

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
        """Start a session and return its name; SandboxFull if there are too many."""
        with self._lock:
            if len(self._sessions) + self._num_opening >= self._max_sessions:
                raise SandboxFull(
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
