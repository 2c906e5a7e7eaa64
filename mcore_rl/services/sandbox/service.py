"""A sandbox for the threads of this process: runs code, and keeps sessions."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mcore_rl.services.sandbox.execution import CodeRequest, CodeResult, execute
from mcore_rl.services.sandbox.languages import find_languages, readable_paths
from mcore_rl.services.sandbox.limits import Limits
from mcore_rl.services.sandbox.pool import WorkerPool
from mcore_rl.services.sandbox.session import BoxSession
from mcore_rl.services.sandbox.sessions import Sessions


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
        SandboxFull if the queue is full. Other failures are results with verdict sandbox_error.
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

    def found(self) -> dict[str, str]:
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
