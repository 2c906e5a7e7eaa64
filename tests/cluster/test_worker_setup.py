"""Workers are executed where nothing forks them, and Ray's own file takes the other kinds."""

import json
import os
import socket as sockets
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mcore_rl.cluster import worker_setup
from mcore_rl.process.fork_request import FORKED, GO, READY

WORKER = "import os, sys; print('worker', *sys.argv[1:])"
RAYS = "import sys; print('Ray', *sys.argv[1:])"


def set_up(folder: Path, *arguments: str, socket: str = "") -> str:
    """Return what the process prints that a node of Ray starts with `arguments`."""
    (folder / "worker.py").write_text(WORKER)
    (folder / "rays.py").write_text(RAYS)
    environment = {worker_setup.RAYS_OWN: str(folder / "rays.py"), worker_setup.FORKS: socket}
    ended = subprocess.run(
        [sys.executable, worker_setup.__file__, str(folder / "worker.py"), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return ended.stdout.strip()


@pytest.mark.parametrize("socket", ["", "nothing/is/here"])
def test_a_plain_worker_is_executed(tmp_path: Path, socket: str) -> None:
    context = json.dumps(
        {"command_prefix": [], "env_vars": {}, "py_executable": sys.executable, "java_jars": []}
    )
    arguments = (
        f"--serialized-runtime-env-context={context}",
        "--language=PYTHON",
        "--worker-id=7",
    )
    assert set_up(tmp_path, *arguments, socket=socket) == "worker --worker-id=7"


@pytest.mark.parametrize(
    ("context", "language"),
    [
        ({"env_vars": {"A": "1"}}, "PYTHON"),
        ({"py_executable": "nsys profile python"}, "PYTHON"),
        ({}, "CPP"),
    ],
)
def test_rays_own_file_takes_any_other(tmp_path: Path, context: object, language: str) -> None:
    arguments = (
        f"--serialized-runtime-env-context={json.dumps(context)}",
        f"--language={language}",
    )
    printed = set_up(tmp_path, *arguments)
    assert printed == f"Ray {tmp_path / 'worker.py'} {' '.join(arguments)}"


@pytest.mark.parametrize(
    ("last", "printed"), [(FORKED, ""), (b"", "worker")], ids=["forked", "hung up"]
)
def test_a_worker_that_could_not_be_forked_is_executed(
    tmp_path: Path, last: bytes, printed: str
) -> None:
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        listener.settimeout(60)
        answering = threading.Thread(target=answer, args=(listener, last))
        answering.start()
        assert set_up(tmp_path, "--language=PYTHON", socket=str(tmp_path / "socket")) == printed
        answering.join()


def answer(listener: sockets.socket, last: bytes) -> None:
    """Take one request, and send `last` where a fork would have been."""
    connection, _ = listener.accept()
    with connection:
        num_bytes = int.from_bytes(connection.recv(8), "little")
        connection.recv(num_bytes, sockets.MSG_WAITALL)
        connection.sendall(READY)
        assert connection.recv(1) == GO
        connection.sendall(last)
