"""Imports what other processes need, once, and forks them from there.

    fork server    imports, waits ----o-------------------o----
    new process                       o- fork             o- fork: turned into the requested program
                                         by its arguments, environment, folder and streams

Only a process with one thread and without CUDA can be forked safely, so this process runs imports
and nothing else. It refuses to fork where a package has started a thread, or where a variable that
imports read has another value. Whoever asked then starts the process itself (fork_request.py has
the messages between the two).
"""

import ctypes
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never

from mcore_rl.process.cores import quiet_threads
from mcore_rl.process.folders import find_short_root
from mcore_rl.process.fork_request import FORKED, GO, PID_BYTES, READY, STATUS_BYTES
from mcore_rl.process.gc_pause import without_collector
from mcore_rl.process.parent_death import die_with_parent
from mcore_rl.process.process_state import wait_killed
from mcore_rl.process.safe_path import safe_module

_VARIABLES = slice(47, 49)
"""Where they begin and end: fields of /proc/<pid>/stat behind its name (proc_pid_stat(5))."""
BACKLOG = 64
ANSWER_S = 10.0
"""Seconds that another process may take to send its request."""
MAX_DESCRIPTORS = 8
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Numpy's OpenBLAS would start threads when it is imported."""
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
"""So that the log of a fork that is killed has all that it printed."""
_PREFIX = "mcore_rl_forks_"
_BELOW = len(f"/{_PREFIX}xxxxxxxx/socket")
ROOM_FOR_TITLES = " " * 2048
"""Behind the command line: a fork's title, as `ps` shows it, cannot be longer than both."""
READ_BY_IMPORTS = (
    "CC",
    "GOMP_",
    "HF_",
    "HOME",
    "KMP_",
    "LD_",
    "MKL_",
    "OMP_",
    "PYTHONHASHSEED",
    "PYTHONPATH",
    "PYTORCH_",
    "SGLANG_",
    "TORCH_",
    "TRANSFORMERS_",
    "XDG_",
)
"""How variables begin that modules may read when they are imported, not when they are used."""
_SET_LATER = (
    "OMP_NUM_THREADS",
    "SGLANG_DSA_FUSE_TOPK",
    "SGLANG_MAMBA_CONV_DTYPE",
    "SGLANG_ZMQ_ALLOWED_PEERS",
    "SGLANG_ZMQ_SOURCE_IP",
)
"""Variables that begin like others, and are read when they are used."""


@dataclass(frozen=True)
class ForkRequest:
    """The process that a fork is to become.

    command          its command line without the interpreter's own options
    is_child         the fork ends with the process that asked, which learns the exit status
    blocked_signals  numbers
    oom_score_adj    how readily the kernel kills it where memory is short, as /proc writes it
    descriptors      of files that it was given: standard streams first
    """

    command: list[str]
    environment: dict[str, str]
    cwd: str
    is_child: bool
    blocked_signals: list[int]
    oom_score_adj: str
    descriptors: list[int]


def become(request: ForkRequest) -> None:
    """Turn a forked child into the requested program: arguments, environment, folder, streams.

    The first three descriptors become its standard streams; the request keeps the others.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked_signals)
    for number, stream in enumerate(request.descriptors[:3]):
        os.dup2(stream, number)
        os.close(stream)
    del request.descriptors[:3]
    with suppress(PermissionError):  # only root may lower it
        Path("/proc/self/oom_score_adj").write_text(request.oom_score_adj)
    _take_environment(request.environment)
    sys.argv = list(request.command)
    os.chdir(request.cwd)
    tempfile.tempdir = None  # TMPDIR is another one now
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own generator does so by itself


def _take_environment(environment: Mapping[str, str]) -> None:
    """Replace os.environ, and the variables that `ps` and /proc show.

    The kernel shows a block of memory, as long as this process's variables were at its start: those
    that do not fit are not shown, and those that differ from the old ones come first. The command
    line that it shows stays; libraries for titles of processes write over it.
    """
    before = dict(os.environ)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = map(int, fields[_VARIABLES])
    os.environ.clear()  # before its memory is written over
    shown = b""
    for name in sorted(environment, key=lambda name: environment[name] == before.get(name)):
        variable = os.fsencode(f"{name}={environment[name]}") + b"\0"
        if len(shown) + len(variable) <= end - start:
            shown += variable
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)
    os.environ.update(environment)


@contextmanager
def fork_server(variable: str, module: str) -> Iterator[None]:
    """Start `module <pid> <path> <descriptor>` in the block, which calls `serve_forks`.

    `variable` of the environment names its socket there. One that it names already is used.
    """
    if _listens(os.environ.get(variable)):
        yield
        return
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=find_short_root(_BELOW)) as folder:
        path = str(Path(folder) / "socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen(BACKLOG)  # whoever comes early waits
            descriptor = listener.fileno()
            process = subprocess.Popen(
                [
                    *(*safe_module(module), str(os.getpid()), path),
                    *(str(descriptor), ROOM_FOR_TITLES),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**quiet_threads(os.environ), **os.environ, **ONE_THREAD, **UNBUFFERED},
                pass_fds=(descriptor,),
            )
        os.environ[variable] = path
        try:
            yield
        finally:
            os.environ.pop(variable, None)
            process.kill()
            wait_killed(process, f"the fork server {module}")


def serve_forks(arguments: list[str], prepare: Callable[[], bool]) -> ForkRequest | None:
    """Import by `prepare`, then fork for each that asks; return its request in each fork.

    Returns None if `prepare` returns False, as with a GPU. Otherwise the process itself never
    returns: it ends with the one that started it.
    """
    parent_pid, path, descriptor = int(arguments[0]), arguments[1], int(arguments[2])
    signal.signal(signal.SIGTERM, lambda *_: _end(path))
    die_with_parent(parent_pid, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started the forks ends them
    environment = dict(os.environ)
    with socket.socket(fileno=descriptor) as listener:
        with without_collector():
            if not prepare():
                return None
        server = _Server(listener, environment)
        fork = None
        while fork is None:
            fork = server.next_fork()
    request, connection = fork
    become(request)
    pid = os.getpid().to_bytes(PID_BYTES, "little")
    with connection, suppress(OSError):  # whoever asked is gone
        connection.sendall(FORKED + pid if request.is_child else FORKED)
    return request


def _listens(path: str | None) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        return path is not None and connection.connect_ex(path) == 0


def _end(path: str) -> Never:
    shutil.rmtree(Path(path).parent, ignore_errors=True)
    os._exit(0)


class _Server:
    """Forks processes on request, reaps them, and kills those whose owners are gone."""

    def __init__(self, listener: socket.socket, environment: Mapping[str, str]) -> None:
        self._listener = listener
        self._environment = environment
        self._owners: dict[int, socket.socket] = {}
        """Process id of a fork that is a child -> the connection of the process that asked."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._ended, self._wakeup = socket.socketpair()
        for end in (self._ended, self._wakeup):
            end.setblocking(False)
        self._selector.register(self._ended, selectors.EVENT_READ)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup.fileno())

    def next_fork(self) -> tuple[ForkRequest, socket.socket] | None:
        """Handle the next event; return None in this process.

        In a new fork, return its request and the connection to the process that asked for it.
        """
        for key, _ in self._selector.select():
            if key.fileobj is self._ended:
                self._bury()
            elif key.fileobj is not self._listener:
                self._kill(key.data)
            elif (fork := self._accept()) is not None:
                return fork
        return None

    def _accept(self) -> tuple[ForkRequest, socket.socket] | None:
        connection, _ = self._listener.accept()
        descriptors: list[int] = []
        pid = server_pid = os.getpid()
        with suppress(OSError):  # whoever asked is gone, or processes are short
            connection.settimeout(ANSWER_S)
            request = self._receive(connection, descriptors)
            if request is not None:
                pid = os.fork()
                if pid == 0:
                    self._leave(request, server_pid)
                    return request, connection
                if request.is_child:
                    self._owners[pid] = connection
                    self._selector.register(connection, selectors.EVENT_READ, pid)
        for descriptor in descriptors:
            os.close(descriptor)
        if pid not in self._owners:
            connection.close()
        return None

    def _receive(self, connection: socket.socket, descriptors: list[int]) -> ForkRequest | None:
        """Return what to fork, and its open files in `descriptors`; None if there is no fork."""
        size, received, _, _ = socket.recv_fds(connection, 8, MAX_DESCRIPTORS)
        descriptors += received
        left = int.from_bytes(size, "little")
        parts: list[bytes] = []
        while left and (part := connection.recv(left)):
            parts.append(part)
            left -= len(part)
        if not parts or left or not is_alone():
            return None
        try:
            asked: dict[str, Any] = json.loads(b"".join(parts))
            python = asked.pop("python")
            request = ForkRequest(**asked, descriptors=list(descriptors))
        except (KeyError, TypeError, ValueError):
            return None  # whoever asked runs another version of this package
        if python != sys.executable:
            return None
        if read_by_imports(request.environment) != read_by_imports(self._environment):
            return None
        connection.sendall(READY)
        return request if connection.recv(1) == GO else None

    def _leave(self, request: ForkRequest, server_pid: int) -> None:
        """Close the server's files in a fork and give the fork a process group of its own.

        Without that group, Ray's node would end the server's group with the fork. A fork that is a
        child dies with the server.
        """
        signal.set_wakeup_fd(-1)
        self._selector.close()
        for each in (self._ended, self._wakeup, *self._owners.values()):
            each.close()
        os.setsid()
        if request.is_child:
            die_with_parent(server_pid)

    def _bury(self) -> None:
        """Collect the exit statuses of forks that have ended, and tell their owners."""
        with suppress(BlockingIOError):
            while self._ended.recv(64):
                pass
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                connection = self._forget(pid)
                if connection is not None:
                    code = os.waitstatus_to_exitcode(status)
                    with connection, suppress(OSError):
                        connection.sendall(code.to_bytes(STATUS_BYTES, "little", signed=True))

    def _kill(self, pid: int) -> None:
        """End a fork whose owner hung up, with its process group."""
        connection = self._forget(pid)
        if connection is not None:
            connection.close()
            for kill in (os.kill, os.killpg):
                with suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)

    def _forget(self, pid: int) -> socket.socket | None:
        connection = self._owners.pop(pid, None)
        if connection is not None:
            self._selector.unregister(connection)
        return connection


def is_alone() -> bool:
    """Return whether this process has no other thread: a fork would keep its locks for good."""
    return len(os.listdir("/proc/self/task")) == 1


def read_by_imports(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which modules must have been imported."""
    return {
        name: value
        for name, value in {**quiet_threads(environment), **environment}.items()
        if name.startswith(READ_BY_IMPORTS) and name not in _SET_LATER
    }
