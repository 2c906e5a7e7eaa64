"""One worker as its pool sees it: starts it, calls it, and ends it with all its processes.

How many episodes a worker takes at once is decided from how long its answers take. Where the keeper
that should kill what a worker started was killed itself, the pool does so.
"""

import asyncio
import contextlib
import itertools
import os
import secrets
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mcore_rl
from mcore_rl.agents.environments.environment import (
    EnvironmentFailedError,
    EnvironmentLostError,
    EnvironmentTimeoutError,
)
from mcore_rl.agents.environments.keeper import OVER_MEMORY_STATUS
from mcore_rl.agents.environments.wire import encode, read_frame
from mcore_rl.process.process_state import STOPPED, describe_state
from mcore_rl.process.redaction import is_secret_name
from mcore_rl.process.safe_path import start_module, without_safe_path

WINDOW_LEN = 16
SLOW_RATIO = 2.0
SLOW_MARGIN_S = 0.2
"""Nobody waits for less beside a policy that samples tokens."""
DECREASE = 0.7
FORGET = 1.1
"""Factor by which the best is forgotten per slow window, as later tasks may be slower by nature."""
TAG = "MCORE_RL_WORKER"
"""Environment variable that all processes below a worker inherit."""
_DEADLINE_S = 10.0
_ABANDON_S = 5.0
"""A worker that has not answered after it, to a request that needs no environment, hangs."""
STOPPED_S = 10
"""How long a worker or its keeper may be stopped (SIGSTOP) before it is killed."""
_EXIT_S = 15.0
_CLOSED = (ConnectionError, RuntimeError)
"""Errors of writing to a worker that is gone; RuntimeError is uvloop's."""
_STOP_S = 3.0
"""A worker asked to stop closes its episodes within 2 s."""
_LOG_TAIL_BYTES = 1500
_PACKAGE = "mcore_rl.agents.environments"


@dataclass(frozen=True)
class EnvironmentOptions:
    """Which environment, and the worker processes that host its episodes.

    kind                 a name of adapters.ADAPTERS or of an entry point, module:Class or
                         folder/file.py:Class
    options              what the environment itself is given
    python               interpreter of the workers; empty: this one
    workers              processes at most; they start when they are needed
    episodes_per_worker  at once, at most; a worker that becomes slow takes fewer
    memory_gib           resident memory of one worker with its processes; 0: not bounded
    start_timeout_s      for a worker to start and import what it needs
    place_timeout_s      for an episode to wait until a worker takes it
    reset_timeout_s, step_timeout_s, close_timeout_s
                         for one call of an environment
    run_timeout_s        for a program that runs a whole episode
    variables            environment variables of the workers, besides those of this process
    log_folder           where the output of each worker goes; empty: a temporary folder
    """

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    python: str = ""
    workers: int = 2
    episodes_per_worker: int = 32
    memory_gib: float = 0.0
    start_timeout_s: float = 60.0
    place_timeout_s: float = 3600.0
    reset_timeout_s: float = 120.0
    step_timeout_s: float = 120.0
    close_timeout_s: float = 20.0
    run_timeout_s: float = 1800.0
    variables: Mapping[str, str] = field(default_factory=dict)
    log_folder: str = ""

    def __post_init__(self) -> None:
        if not self.kind:
            raise ValueError("an environment needs a kind, for example gymnasium")
        for name in ("workers", "episodes_per_worker"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: at least 1")
        if self.memory_gib < 0:
            raise ValueError(f"memory_gib is {self.memory_gib}: 0 for no bound, or more")
        for name in ("start", "place", "reset", "step", "close", "run"):
            seconds = getattr(self, f"{name}_timeout_s")
            if not seconds > 0:
                raise ValueError(f"{name}_timeout_s is {seconds}: more than 0 seconds")
        for name, value in self.variables.items():
            if not isinstance(value, str):
                raise ValueError(f"variables: {name} is {value!r}, not text: quote it")


class Concurrency:
    """Additive increase, multiplicative decrease between an eighth of `most` and `most` episodes.

    The median of a window of answers, at least WINDOW_LEN and about one of each episode, is
    compared with the best median that this worker has had. A window more than SLOW_RATIO times as
    slow lowers `limit`; any other raises it.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.least = max(1, most // 8)
        self.limit = max(1, most // 2)
        self._best_s: float | None = None
        self._window: list[float] = []

    def observe(self, seconds: float) -> str:
        """Take the seconds of one answer; return why `limit` fell, or an empty text."""
        self._window.append(seconds)
        if len(self._window) < max(WINDOW_LEN, self.limit):
            return ""
        median_s = statistics.median(self._window)
        self._window.clear()
        if self._best_s is None or median_s < self._best_s:
            self._best_s = median_s
        before = self.limit
        best_s = self._best_s
        if median_s > SLOW_RATIO * self._best_s + SLOW_MARGIN_S:
            self.limit = max(self.least, int(self.limit * DECREASE))
            self._best_s = min(median_s, self._best_s * FORGET)
        else:
            self.limit = min(self.most, self.limit + self.least)
        if self.limit >= before:
            return ""
        return (
            f"its answers take {median_s:.3f} s, {best_s:.3f} s at best: "
            f"it takes {self.limit} episodes at once instead of {before}"
        )


def kill_tagged(tag: str) -> int:
    """Kill the processes whose environment says TAG=`tag`, until none is left; return how many.

    Those that cleared their environment, or belong to another user, are not found.
    """
    entry = f"{TAG}={tag}".encode()
    killed: set[int] = set()
    deadline_s = time.monotonic() + _DEADLINE_S
    while (pids := _list_marked(entry)) and time.monotonic() < deadline_s:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed.add(pid)
        time.sleep(0.005)
    return len(killed)


def _list_marked(entry: bytes) -> list[int]:
    """Return the processes that have this entry; one that ended has an empty environment."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if entry in file.read().split(b"\0"):
                    found.append(int(name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def make_import_folder(folder: Path) -> None:
    """Link this package into `folder`, and make a folder for a worker's temporary files there.

    The link is all that a foreign interpreter gets of this one's packages.
    """
    (folder / "tmp").mkdir()
    (folder / "mcore_rl").symlink_to(Path(mcore_rl.__file__).parent, target_is_directory=True)


def make_worker_environment(options: EnvironmentOptions, folder: Path) -> dict[str, str]:
    """Return the environment variables of a worker that imports this package from `folder`.

    A foreign interpreter does not inherit PYTHONPATH and PYTHONHOME, which name packages of this
    one. Nobody inherits variables that are secret by their names: what an environment needs to know
    of these, its options say.
    """
    inherited = without_safe_path(os.environ)
    variables = {name: text for name, text in inherited.items() if not is_secret_name(name)}
    if options.python:
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            variables.pop(name, None)
    variables.setdefault("OMP_NUM_THREADS", "1")
    variables["PYTHONUNBUFFERED"] = "1"
    variables["TMPDIR"] = str(folder / "tmp")  # a worker that is killed removes nothing itself
    variables |= options.variables
    paths = [str(folder), variables.get("PYTHONPATH", "")]
    variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return variables


class WorkerProcess:
    """A running worker.

    lost              why it is gone; empty: it answers
    after_deadline_s  how long its environment's `run` may go on after the deadline, to score
    """

    def __init__(self, number: int, options: EnvironmentOptions, log_path: Path) -> None:
        self.name = f"worker {number}"
        self.concurrency = Concurrency(options.episodes_per_worker)
        self.episodes: set[int] = set()
        self.retires = False
        self.lost = ""
        self.after_deadline_s = 0.0
        self.log_path = log_path
        self._kind = options.kind
        self._options = options
        self._calls = itertools.count()
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._alive_fd = -1
        self._tag = secrets.token_hex(16)
        self._reading: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._is_over = asyncio.Event()

    async def start(self, folder: Path, on_lost: Callable[[], None]) -> None:
        """Start the process and have it load the environment's class.

        Raises EnvironmentFailedError if it cannot, EnvironmentLostError if it dies or takes too
        long. `on_lost` is called when the worker is gone.
        """
        ours, theirs = socket.socketpair()
        alive_fd, self._alive_fd = os.pipe()
        try:
            self._process = await self._spawn(folder, theirs.fileno(), alive_fd)
        except OSError as error:
            ours.close()
            self._let_go()
            raise EnvironmentFailedError(
                f"{self._options.python or sys.executable} cannot be started as {self.name} of "
                f"environment {self._kind}: {error}"
            ) from error
        finally:
            theirs.close()
            os.close(alive_fd)
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._reading = asyncio.ensure_future(self._read(on_lost))
        try:
            told = await self.call(
                "start", "loading its class", self._options.start_timeout_s, self._load()
            )
        except BaseException:
            await self.stop()
            raise
        self.after_deadline_s = told["after_deadline_s"]
        self._watching = asyncio.ensure_future(self._end_if_stopped(told["pid"]))

    async def call(
        self, verb: str, what: str, timeout_s: float, fields: Mapping[str, Any] | None = None
    ) -> Any:
        """Have the worker carry out `verb` and return the value of its reply.

        `what` says what for, such as "step of task 3". Raises EnvironmentFailedError with the error
        of the environment, EnvironmentTimeoutError if the worker goes on without it,
        EnvironmentLostError if the worker died or hangs, ValueError if a field is not JSON.
        """
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._exchange(verb, what, fields or {})
        except TimeoutError as error:
            late = f"{self._who(what)} took more than {timeout_s:g} s ({verb}_timeout_s)"
            await self._give_up((fields or {}).get("episode"), late)
            raise EnvironmentTimeoutError(f"{late}; its log is {self.log_path}") from error
        if problem := reply.get("error"):
            raise EnvironmentFailedError(
                f"{self._who(what)} failed: {problem['kind']}: {problem['text']}\n"
                f"{problem.get('traceback', '')}"
            )
        return reply["value"]

    async def abandon(self, episode: int) -> None:
        """Give up an episode whose caller does not wait for its call any more."""
        with contextlib.suppress(EnvironmentLostError):
            await self._give_up(episode, f"{self.name} of environment {self._kind}, abandoning")

    async def stop(self) -> None:
        """End the worker and every process below it; its open episodes are closed first."""
        if not self.lost:
            self.lost = f"{self.name} of environment {self._kind} was stopped"
            with contextlib.suppress(*_CLOSED):
                self._writer.write(encode({"do": "stop"}))
            await asyncio.wait([self._reading], timeout=_STOP_S) if self._reading else None
        await self._end()

    def _load(self) -> dict[str, Any]:
        return {"kind": self._kind, "options": dict(self._options.options)}

    def _who(self, what: str) -> str:
        return f"environment {self._kind}, {self.name} (pid {self._process.pid}): {what}"

    async def _exchange(self, verb: str, what: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        if self.lost:
            raise EnvironmentLostError(f"{self._who(what)}: {self.lost}")
        number = next(self._calls)
        frame = encode({"call": number, "do": verb, **fields})
        self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            with contextlib.suppress(*_CLOSED):  # the reader is about to notice, too
                self._writer.write(frame)
                await self._writer.drain()
            reply = await self._replies[number]
        finally:
            del self._replies[number]
        if lost := reply.get("lost"):
            raise EnvironmentLostError(f"{self._who(what)}: {lost}")
        return reply

    async def _give_up(self, episode: int | None, late: str) -> None:
        """Find out whether the worker hangs or one episode does; kill the worker if it hangs."""
        try:
            async with asyncio.timeout(_ABANDON_S):
                reply = await self._exchange("abandon", late, {"episode": episode})
        except TimeoutError as error:
            self.lost = f"{late}, and the worker does not answer any more: it was killed"
            await self._end()
            raise EnvironmentLostError(f"{self.lost}{self._log_tail()}") from error
        self.retires = self.retires or bool(reply["value"])

    async def _end_if_stopped(self, pid: int) -> None:
        """Kill the worker with this process id once it or its keeper is stopped for STOPPED_S."""
        seconds = 0
        while seconds < STOPPED_S:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._is_over.wait()
                return
            is_stopped = STOPPED in (describe_state(self._process.pid), describe_state(pid))
            seconds = seconds + 1 if is_stopped else 0
        self.lost = f"the worker was stopped (state T) for {STOPPED_S} s and was killed"
        self._process.send_signal(signal.SIGCONT)  # a keeper that is stopped ends nobody
        await self._end()

    async def _read(self, on_lost: Callable[[], None]) -> None:
        try:
            while (reply := await read_frame(self._reader)) is not None:
                waiting = self._replies.get(reply["call"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
        finally:
            self._is_over.set()
            if not self.lost:
                self.lost = await self._cause_of_death()
            for waiting in self._replies.values():
                if not waiting.done():
                    waiting.set_result({"lost": self.lost})
            self._let_go()
            on_lost()

    async def _cause_of_death(self) -> str:
        try:
            async with asyncio.timeout(_EXIT_S):
                status = await self._process.wait()
        except TimeoutError:
            return f"the worker closed its socket and has not ended {_EXIT_S:g} s later"
        if status < 0:  # a signal ended the keeper, which could not end what is below it
            await asyncio.to_thread(kill_tagged, self._tag)
        if status == OVER_MEMORY_STATUS:
            return (
                f"the worker took more than {self._options.memory_gib:g} GiB and was killed: "
                "raise memory_gib, or lower episodes_per_worker"
            )
        return f"the worker died with status {status}{self._log_tail()}"

    async def _end(self) -> None:
        """Have the keeper kill everything; it does so when the pipe to it is closed."""
        self._let_go()
        try:
            async with asyncio.timeout(_EXIT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
            await asyncio.to_thread(kill_tagged, self._tag)
        self._writer.close()
        if self._reading:
            await asyncio.wait([self._reading])

    def _let_go(self) -> None:
        if self._alive_fd >= 0:
            os.close(self._alive_fd)
            self._alive_fd = -1

    def _log_tail(self) -> str:
        try:
            tail = self.log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        except FileNotFoundError:
            return ""
        return f"; the end of its log {self.log_path}:\n{tail}" if tail else ""

    async def _spawn(self, folder: Path, socket_fd: int, alive_fd: int) -> Any:
        python = self._options.python or sys.executable
        memory_bytes = int(self._options.memory_gib * 1024**3)
        command = [*start_module(python, f"{_PACKAGE}.keeper"), "--pool-pid", str(os.getpid())]
        command += ["--alive-fd", str(alive_fd), "--socket-fd", str(socket_fd)]
        command += ["--memory-bytes", str(memory_bytes)]
        command += [*start_module(python, f"{_PACKAGE}.worker"), "--socket-fd", str(socket_fd)]
        with open(self.log_path, "ab") as log:
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(socket_fd, alive_fd),
                env=make_worker_environment(self._options, folder) | {TAG: self._tag},
                start_new_session=True,  # Ctrl-C is for the pool, which ends its workers in order
            )
