"""Starts one SGLang server as a child process and waits until it is healthy."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from mcore_rl.process.ports import find_free_port
from mcore_rl.process.temp_dir import TempDir

_HEALTH_POLL_S = 0.1
_KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class EngineSpec:
    """The options of one engine: `tp` * `pp` ranks on `num_nodes` machines, with a server on each.

    Raises ValueError if sizes do not fit each other.

    attention_dp           groups of the `tp` ranks that each hold all attention weights
    kv_cache_len           tokens of KV cache, all requests together
    max_running            requests decoded at once
    weight_version         version of the weights in model_path, which samples report
    deterministic          honor the sampling seed of each request
    routed_experts         answer requests that ask which experts each token went to
    custom_weight_loaders  import paths of functions `load(model, named_tensors)` for weight updates
    tokenizer              take and give text, which needs the model's tokenizer; else token ids
    trust_remote_code      run Python code that comes with the model's configuration or tokenizer
    port                   None: a free one is found when the engine starts
    dist_init_addr         host:port where the ranks meet, needed if num_nodes > 1
    can_release_memory     its GPU memory can be released and occupied again while it runs
    environment            variables for its processes, added to those of the process that starts it
    extra_args             further SGLang command-line arguments
    """

    model_path: str
    log_path: str
    dtype: str = "float32"
    tp: int = 1
    ep: int = 1
    pp: int = 1
    attention_dp: int = 1
    kv_cache_len: int = 65536
    max_running: int = 256
    weight_version: int = 0
    deterministic: bool = False
    routed_experts: bool = False
    custom_weight_loaders: tuple[str, ...] = ()
    tokenizer: bool = False
    trust_remote_code: bool = False
    seed: int = 0
    host: str = "127.0.0.1"
    port: int | None = None
    num_nodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    can_release_memory: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    extra_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.tp % self.ep:
            raise ValueError(f"ep={self.ep} does not divide tp={self.tp}")
        if self.num_nodes > 1 and self.dist_init_addr is None:
            raise ValueError(
                f"num_nodes={self.num_nodes} needs dist_init_addr, host:port of node 0"
            )

    def arguments(self) -> list[str]:
        """Return the command-line arguments of mcore_rl.rollout.server; the port must be known."""
        assert self.port is not None
        options: dict[str, object] = {
            "--model-path": self.model_path,
            "--host": self.host,
            "--port": self.port,
            "--dtype": self.dtype,
            "--tp-size": self.tp,
            "--ep-size": self.ep,
            "--max-total-tokens": self.kv_cache_len,
            "--max-running-requests": self.max_running,
            "--random-seed": self.seed,
            "--weight-version": self.weight_version,
            "--log-level-http": "warning",
        }
        if self.pp > 1:
            options["--pp-size"] = self.pp
        if self.num_nodes > 1:
            options |= {"--nnodes": self.num_nodes, "--node-rank": self.node_rank}
            options |= {"--dist-init-addr": self.dist_init_addr}
        flags = ["--skip-server-warmup", "--sleep-on-idle"]
        if not self.tokenizer:
            flags.append("--skip-tokenizer-init")
        if self.trust_remote_code:
            flags.append("--trust-remote-code")
        if self.attention_dp > 1:
            flags += ["--enable-dp-attention", "--dp-size", str(self.attention_dp)]
        if self.deterministic:
            flags.append("--enable-deterministic-inference")
        if self.can_release_memory:
            flags.append("--enable-memory-saver")
        if self.routed_experts:
            flags.append("--enable-return-routed-experts")
        if self.custom_weight_loaders:
            flags += ["--custom-weight-loader", *self.custom_weight_loaders]
        arguments = [str(part) for item in options.items() for part in item]
        return arguments + flags + list(self.extra_args)


@dataclass(frozen=True)
class EngineAddress:
    """Where an engine answers, and where it logs."""

    url: str
    log_path: str

    def __str__(self) -> str:
        return f"engine {self.url} (log {self.log_path})"


class EngineProcess:
    """Starts, checks and stops one server; as a context manager, waits until it is healthy."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec if spec.port is not None else replace(spec, port=find_free_port(spec.host))
        self.url = f"http://{self.spec.host}:{self.spec.port}"
        self._process: subprocess.Popen[bytes] | None = None
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
    def name(self) -> str:
        """The engine's name in messages."""
        return f"engine {self.url} (log {self.spec.log_path})"

    def start(self) -> None:
        """Start the server and return at once.

        A separate thread starts it and waits for its end, because the kernel kills the child
        together with the thread that started it (see server.die_with_parent); that thread must live
        as long as the child.
        """
        assert self._process is None, f"{self.name} was started before"
        Path(self.spec.log_path).parent.mkdir(parents=True, exist_ok=True)
        self._temp_dir = TempDir()
        started: Future[subprocess.Popen[bytes]] = Future()
        self._waiting = threading.Thread(target=self._start_and_wait, args=(started,), daemon=True)
        self._waiting.start()
        self._process = started.result()

    def _start_and_wait(self, started: "Future[subprocess.Popen[bytes]]") -> None:
        command = [
            sys.executable,
            "-m",
            "mcore_rl.rollout.server",
            "--parent-pid",
            str(os.getpid()),
        ]
        try:
            with open(self.spec.log_path, "ab") as log:
                process = subprocess.Popen(
                    command + self.spec.arguments(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=self._environment(),
                )
        except OSError as error:
            started.set_exception(error)
            return
        started.set_result(process)
        process.wait()

    def _environment(self) -> dict[str, str]:
        """Return the server's environment.

        SGLang leaves files in its temporary folder, so each server gets its own; compile caches are
        shared.
        """
        assert self._temp_dir is not None
        environment = {**os.environ, "TMPDIR": self._temp_dir.path, "PYTHONUNBUFFERED": "1"}
        environment |= self.spec.environment
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor")
        return environment

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

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5.0) as response:
                return response.status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def is_alive(self) -> bool:
        return self._process is not None and self.exit_status is None

    @property
    def exit_status(self) -> int | None:
        """The server's exit code, or minus the signal that killed it; None while it runs.

        Asks the kernel, since the thread that waits for the server may not have woken yet.
        """
        if self._process is None:
            return None
        if self._process.returncode is not None:
            return self._process.returncode
        with contextlib.suppress(ChildProcessError):  # the waiting thread has reaped it already
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return None
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        self._waiting.join(_KILL_TIMEOUT_S)
        return self._process.returncode

    def tail(self, num_lines: int = 30) -> str:
        """Return the last lines of the log, each with a leading bar."""
        with contextlib.suppress(FileNotFoundError):
            lines = Path(self.spec.log_path).read_text(errors="replace").splitlines()[-num_lines:]
            return "\n".join(f"  | {line}" for line in lines)
        return "  | (no log)"

    def stop(self) -> None:
        """Kill the server and all its processes and wait until they are gone.

        Does nothing if it was stopped already. Raises TimeoutError naming processes that do not
        end.
        """
        # Once the server is stopped, its pid may belong to another process.
        if self._process is None or self._temp_dir is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while left := list(_group_members(self.pid)):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{self.name}: processes {left} are still there {_KILL_TIMEOUT_S} s after"
                    " SIGKILL"
                )
            time.sleep(0.02)
        self._waiting.join(_KILL_TIMEOUT_S)
        self._temp_dir.remove()
        self._temp_dir = None


def _group_members(group_id: int) -> Iterator[int]:
    """Yield the process ids of a process group, without zombies."""
    for process in psutil.process_iter(["pid", "status"]):
        with contextlib.suppress(ProcessLookupError):
            is_zombie = process.info["status"] == psutil.STATUS_ZOMBIE
            if os.getpgid(process.pid) == group_id and not is_zombie:
                yield process.pid
