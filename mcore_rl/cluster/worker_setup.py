"""Becomes a worker of Ray, in place of Ray's own setup_worker.py, which imports Ray to do so.

Ray's node starts this file as a script. It imports the standard library only. A worker with a
runtime environment is left to Ray's file. Any other is forked from the process that has imported
already what workers import (worker_forks.py), or executed here if there is no such process.
"""

import json
import os
import signal
import socket
import sys

FORKS = "MCORE_RL_WORKER_FORKS"
"""The variable that names the socket of the process that forks workers."""
RAYS_OWN = "MCORE_RL_RAY_SETUP_WORKER"
"""The variable that names Ray's setup_worker.py."""
READY, GO, FORKED = b"r", b"g", b"f"
IMPORTS_S = 60.0
"""Seconds to wait for the other process to be ready."""
_CONTEXT = "--serialized-runtime-env-context="
_LANGUAGE = "--language="


def main(arguments: list[str]) -> None:
    context = "{}"
    language = ""
    command: list[str] = []
    for argument in arguments:
        if argument.startswith(_CONTEXT):
            context = argument.removeprefix(_CONTEXT)
        elif argument.startswith(_LANGUAGE):
            language = argument.removeprefix(_LANGUAGE)
        else:
            command.append(argument)
    if language != "PYTHON" or not _is_plain(context):
        os.execv(sys.executable, [sys.executable, os.environ[RAYS_OWN], *arguments])
    if not _fork(command):
        os.execv(sys.executable, [sys.executable, *command])


def _is_plain(context: str) -> bool:
    """Return whether a runtime environment changes nothing."""
    settings = json.loads(context)
    same_python = settings.pop("py_executable", None) in (None, sys.executable)
    return same_python and not any(settings.values())


def _fork(command: list[str]) -> bool:
    """Have the worker forked with this process's environment and output; False if it was not.

        this process  | request ->          | go ->            | ends
        the other one |          <- ready   |       | <- forked  |

    Only one of the two starts the worker, even if the other process answers too late: this one does
    if no go was sent, or if the other one hangs up instead of forking.
    """
    path = os.environ.get(FORKS, "")
    if not path or command[0].startswith("-"):
        return False
    request = {
        "command": command,
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
        # Ray's node blocks Ctrl-C, which a terminal sends to all processes of the run.
        "blocked_signals": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    }
    data = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(IMPORTS_S)
        try:
            connection.connect(path)
            socket.send_fds(connection, [len(data).to_bytes(8, "little")], [0, 1, 2])
            connection.sendall(data)
            if connection.recv(1) != READY:
                return False
            connection.sendall(GO)
        except OSError:
            return False
        try:
            return connection.recv(1) == FORKED
        except TimeoutError:
            return True  # it has been told to, and is still there
        except OSError:
            return False


if __name__ == "__main__":
    main(sys.argv[1:])
