"""Imports what workers import, once, and forks Ray's workers from there; without CUDA only.

    command   |- imports of the controller -|- Ray ...............|
    this      |- torch, Megatron -----------| o- trainer rank 0
                                            | o- trainer rank 1   o: fork, asked for by
                                            | o- collector           worker_setup.py

A fork is safe of a process that has one thread and no CUDA: this one runs imports and nothing else.
Where there is a GPU it ends, before it has forked, and where a package has started a thread it
refuses; workers are then started as Ray starts them.
"""

import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from mcore_rl.cluster.worker_setup import FORKED, FORKS, GO, READY
from mcore_rl.process.cores import QUIET
from mcore_rl.process.lazy_imports import without_collector
from mcore_rl.process.tied import die_with_parent

BACKLOG = 64
ANSWER_S = 10.0
"""Seconds that a worker may take to say what it needs."""
MODULES = (
    "mcore_rl.agents.images",
    "mcore_rl.data.sample_store",
    "mcore_rl.planning.slots",
    "mcore_rl.process.http",
    "mcore_rl.rewards.of_recipe",
    "mcore_rl.rollout.collector",
    "mcore_rl.train.actor",
    "mcore_rl.train.runtime",
)
"""Modules for workers: none imports Ray, which reads its settings from the environment then."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Numpy's OpenBLAS would start threads when it is imported."""


@contextmanager
def worker_forks() -> Iterator[None]:
    """Start the process in the block, and name its socket to the workers of this process."""
    with tempfile.TemporaryDirectory(prefix="mcore_rl_forks_") as folder:
        path = str(Path(folder) / "socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen(BACKLOG)  # workers that come early wait
            descriptor = listener.fileno()
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(os.getpid()), path, str(descriptor)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**QUIET, **os.environ, **ONE_THREAD},
                pass_fds=(descriptor,),
            )
        os.environ[FORKS] = path
        try:
            yield
        finally:
            os.environ.pop(FORKS, None)
            process.kill()
            process.wait()


def main(parent_pid: int, path: str, descriptor: int) -> None:
    """Import, then fork a worker for each that asks, until the controller ends."""
    signal.signal(signal.SIGTERM, lambda *_: _end(path))
    die_with_parent(parent_pid, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller ends its workers
    with socket.socket(fileno=descriptor) as listener:
        with without_collector():
            if not _import_all():
                return
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the forks
        while True:
            connection, _ = listener.accept()
            streams: list[int] = []
            with connection, suppress(OSError):  # whoever asked is gone, or processes are short
                connection.settimeout(ANSWER_S)
                request = _receive(connection, streams)
                if request is not None:
                    if os.fork() == 0:
                        break
                    connection.sendall(FORKED)
            for stream in streams:
                os.close(stream)
    _become(request, streams)


def _end(path: str) -> None:
    shutil.rmtree(Path(path).parent, ignore_errors=True)
    os._exit(0)


def _import_all() -> bool:
    """Import what workers need; return False, having imported little, if there is a GPU."""
    from mcore_rl.data.tokenizer import import_auto_tokenizer
    from mcore_rl.device import has_cuda, leave_compiler_out

    if has_cuda():
        return False
    leave_compiler_out()
    import_auto_tokenizer()
    for module in MODULES:
        import_module(module)
    return True


def _is_alone() -> bool:
    """Return whether this process has no other thread: a fork would keep its locks for good."""
    return len(os.listdir("/proc/self/task")) == 1


def _receive(connection: socket.socket, streams: list[int]) -> dict[str, Any] | None:
    """Return what to run, and its standard streams in `streams`; None if there is no fork."""
    size, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
    streams += descriptors
    left = int.from_bytes(size, "little")
    parts: list[bytes] = []
    while left and (part := connection.recv(left)):
        parts.append(part)
        left -= len(part)
    if not parts or left or not _is_alone():
        return None
    connection.sendall(READY)
    if connection.recv(1) != GO:
        return None
    return json.loads(b"".join(parts))


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """Run a worker in this fork, as a new process would that was given its command."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked_signals"])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    tempfile.tempdir = None  # TMPDIR is another one now
    sys.modules["numpy"].random.seed()  # Python's own generator does so by itself
    sys.argv = request["command"]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
