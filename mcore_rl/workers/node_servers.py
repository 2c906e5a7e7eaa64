"""The sandbox and the search server of a node: a collector starts them, and they end with it."""

import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.config import SandboxConfig, SearchConfig
from mcore_rl.process.network import find_free_port
from mcore_rl.process.redaction import remember_secret
from mcore_rl.process.safe_path import safe_module
from mcore_rl.process.server_keys import SANDBOX_URL, SEARCH_URL, publish, withdraw
from mcore_rl.process.supervised import SupervisedServer, SupervisedSpec

HOST = "127.0.0.1"
_KEY_BYTES = 24
BUSY_STATUS = "504"
"""verl's clients ask again at this status only, and take others for a failed program."""


@dataclass(frozen=True)
class NodeServersSpec:
    """The servers that a recipe has on each node with engines.

    log_dir    where their output goes
    start_s    seconds for them to start
    """

    sandbox: SandboxConfig
    search: SearchConfig
    log_dir: Path
    start_s: float


class NodeServers:
    """The servers of one node. Their addresses are in this process's environment from the start."""

    def __init__(self, spec: NodeServersSpec, name: str) -> None:
        """Begin to start the servers; they log to <log_dir>/<kind>_<name>.log."""
        self._start_s = spec.start_s
        self._servers: list[SupervisedServer] = []
        self.urls: dict[str, str] = {}
        self._key = secrets.token_urlsafe(_KEY_BYTES)
        remember_secret(self._key)
        log_dir = spec.log_dir.absolute()
        if spec.sandbox.is_used:
            arguments = list_sandbox_arguments(spec.sandbox)
            self._start("sandbox", arguments, log_dir / f"sandbox_{name}.log", SANDBOX_URL)
        if spec.search.is_used:
            arguments = list_search_arguments(spec.search)
            self._start("search", arguments, log_dir / f"search_{name}.log", SEARCH_URL)
        publish(self.urls)

    def wait_healthy(self) -> None:
        """Wait until all servers answer; RuntimeError or TimeoutError says which does not."""
        until_s = time.monotonic() + self._start_s
        for server in self._servers:
            server.wait_healthy(max(until_s - time.monotonic(), 1.0))

    @property
    def pids(self) -> dict[str, int | None]:
        """The servers' process ids by name."""
        return {server.spec.name: server.pid for server in self._servers}

    def close(self) -> None:
        """End the servers, and take their addresses back."""
        withdraw(self.urls)
        for server in self._servers:
            server.stop()

    def _start(self, kind: str, arguments: tuple[str, ...], log_path: Path, variable: str) -> None:
        port = find_free_port(HOST)
        address = ("--host", HOST, "--port", str(port))
        command = (*safe_module("mcore_rl.cli"), kind, "serve", *address, *arguments)
        url = f"http://{HOST}:{port}"
        spec = SupervisedSpec(
            f"{kind} server {url}", command, f"{url}/healthz", log_path, self._key
        )
        self._servers.append(SupervisedServer(spec))
        path = {"sandbox": "run_code", "search": "retrieve"}[kind]
        self.urls[variable] = f"http://run:{self._key}@{HOST}:{port}/{path}"


def list_sandbox_arguments(sandbox: SandboxConfig) -> tuple[str, ...]:
    """Return the arguments of `mcore-rl sandbox serve`, without address and key."""
    options = {
        "workers": sandbox.workers,
        "max-waiting": sandbox.max_waiting,
        "wall-s": sandbox.wall_s,
        "memory-mib": sandbox.memory_mib,
        "max-memory-mib": sandbox.max_memory_mib,
        "processes": sandbox.processes,
        "files-mib": sandbox.files_mib,
        "output-kib": sandbox.output_kib,
        "max-sessions": sandbox.max_sessions,
        "idle-s": sandbox.idle_s,
        "session-s": sandbox.session_s,
    }
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    flags = [] if sandbox.cgroups else ["--no-cgroups"]
    if sandbox.bubblewrap:
        flags.append("--bubblewrap")
    return (*given, "--busy-status", BUSY_STATUS, *flags)


def list_search_arguments(search: SearchConfig) -> tuple[str, ...]:
    """Return the arguments of `mcore-rl search serve`, without address and key."""
    return (
        *("--index", search.index),
        *("--method", search.method),
        *("--threads", str(search.threads)),
        *("--queue-len", str(search.queue_len)),
        *("--deadline-s", str(search.deadline_s)),
    )
