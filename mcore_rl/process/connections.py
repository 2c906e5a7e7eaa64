"""Ends the network connections that a block of code made, whoever waits for their other ends."""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_KINDS = (socket.AF_INET, socket.AF_INET6)


class Connections:
    """Connections of this process; one thread notes them, and any other may end them."""

    def __init__(self) -> None:
        self._noted: set[int] = set()
        self._before: set[int] | None = None
        """Sockets of before the block of `note` that runs now."""

    @contextmanager
    def note(self) -> Iterator[None]:
        """Note the connections that are made in the block and last."""
        self._before = set(_find_sockets())
        try:
            yield
        finally:
            self._noted |= set(_find_sockets()) - self._before
            self._before = None

    def end(self) -> None:
        """Shut what was noted, as if the other ends had: whoever waits for bytes gets an error.

        Sockets stay open for their owners to close. Those that listen go on.
        """
        before = self._before
        found = _find_sockets()
        noted = self._noted if before is None else self._noted | (set(found) - before)
        for inode in noted & set(found):
            _shut(found[inode], inode)
        self._noted.clear()


def _find_sockets() -> dict[int, int]:
    """Return the descriptors of this process's sockets by inode, which no other socket ever has."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was closed meanwhile
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


def _shut(descriptor: int, inode: int) -> None:
    """Shut a socket in both directions, unless it has become another one or listens."""
    with suppress(OSError):
        kept = os.dup(descriptor)
        if os.fstat(kept).st_ino != inode:
            os.close(kept)
            return
        with socket.socket(fileno=kept) as own:
            if own.family in _KINDS and not own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                own.shutdown(socket.SHUT_RDWR)
