"""Messages between a caller, a warden and a box: JSON with file descriptors, over a Unix socket."""

import fcntl
import json
import os
import select
import socket
import time
from collections.abc import Sequence
from typing import IO, Any

MAX_BYTES = 1 << 16
_MAX_FDS = 8

Message = dict[str, Any]


def make_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that keep the bounds of messages."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send a message with descriptors.

    Raises ValueError if it is too long, and OSError if the other end is closed.
    """
    data = json.dumps(message).encode()
    if len(data) > MAX_BYTES:
        raise ValueError(f"a message of {len(data)} bytes, at most {MAX_BYTES}: send fewer paths")
    socket.send_fds(end, [data], list(fds))


def receive(end: socket.socket) -> tuple[Message, list[int]] | None:
    """Return the next message and its descriptors, or None if the other end is closed."""
    try:
        data, fds, _, _ = socket.recv_fds(end, MAX_BYTES, _MAX_FDS)
    except ConnectionResetError:  # the other end died with messages of ours unread
        return None
    for fd in fds:
        os.set_inheritable(fd, False)
    return (json.loads(data), fds) if data else None


def wait_readable(fds: Sequence[int], deadline: float | None) -> list[int]:
    """Return those of `fds` that have something to read or are closed; none at the deadline."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0) * 1000 + 1
    return [fd for fd, _ in poll.poll(left_s)]


def memory_file(content: bytes = b"", is_sealed: bool = False) -> IO[bytes]:
    """Return a file without a name, at its start; a sealed one can never change again."""
    file = os.fdopen(os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b")
    file.write(content)
    file.seek(0)
    if is_sealed:
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file
