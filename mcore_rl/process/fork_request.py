"""Asks a fork server, a process with all imports done (fork_server.py), to fork a new process.

    this process  | request ->          | go ->            |                    <- exit status |
    fork server   |          <- ready   |       <- forked  | waits for the fork's end          |

Only one of the two starts the new process, even if the fork server answers too late: this process
starts it if it sent no go, or if the fork server hangs up instead of forking. This module imports
only the standard library, so that a process that only asks for a fork starts at once.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

READY, GO, FORKED = b"r", b"g", b"f"
IMPORTS_S = 60.0
"""Seconds to wait for the fork server to be ready."""
PID_BYTES = 4
STATUS_BYTES = 4


class ForkedProcess:
    """A process that a fork server forked for this process; it is killed when this process ends."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self.pid = pid

    def wait(self) -> int:
        """Wait for the end; return the exit code, or minus the signal that killed the process."""
        with self._connection as connection:
            connection.settimeout(None)
            status = _receive(connection, STATUS_BYTES)
        # The fork server is gone; the kernel has killed its forks.
        return int.from_bytes(status, "little", signed=True) if status else -signal.SIGKILL


def fork_child(
    path: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    streams: Sequence[int],
    descriptors: Sequence[int] = (),
) -> ForkedProcess | None:
    """Fork a process that runs `command` and dies with this process; return None on failure.

    path         the fork server's socket; there may be no server
    streams      standard input, output and error of the new process
    descriptors  other open files that the new process inherits
    """
    request = {"command": list(command), "environment": dict(environment), "is_child": True}
    connection = _ask(path, request, [*streams, *descriptors])
    if connection is None:
        return None
    try:
        answer = _receive(connection, len(FORKED) + PID_BYTES)
    except OSError:
        answer = b""
    if not answer:
        connection.close()  # The server kills a fork that comes too late.
        return None
    return ForkedProcess(connection, int.from_bytes(answer[len(FORKED) :], "little"))


def fork_detached(path: str, command: Sequence[str]) -> bool:
    """Fork a process that may outlive this process, with the same environment and streams.

    Returns whether the process was forked.
    """
    request = {"command": list(command), "environment": dict(os.environ), "is_child": False}
    connection = _ask(path, request, [0, 1, 2])
    if connection is None:
        return False
    with connection:
        try:
            return connection.recv(len(FORKED)) == FORKED
        except TimeoutError:
            return True  # The fork server got the go and still runs.
        except OSError:
            return False


def _ask(
    path: str, request: Mapping[str, object], descriptors: Sequence[int]
) -> socket.socket | None:
    """Send request and go; return the connection, or None if no fork server accepts the request."""
    data = json.dumps(
        {
            **request,
            "cwd": os.getcwd(),
            "python": sys.executable,
            "oom_score_adj": Path("/proc/self/oom_score_adj").read_text(),
            # Ray's node blocks SIGINT: Ctrl-C in a terminal reaches all processes of the run.
            "blocked_signals": [
                int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())
            ],
        }
    ).encode()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(IMPORTS_S)
    try:
        connection.connect(path)
        socket.send_fds(connection, [len(data).to_bytes(8, "little")], descriptors)
        connection.sendall(data)
        if connection.recv(1) == READY:
            connection.sendall(GO)
            return connection
    except OSError:
        pass
    connection.close()
    return None


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    """Receive `num_bytes` bytes; return b"" if the fork server hangs up first."""
    data = b""
    while len(data) < num_bytes:
        part = connection.recv(num_bytes - len(data))
        if not part:
            return b""
        data += part
    return data
