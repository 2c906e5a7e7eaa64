"""Finds a port on a host that a server can bind a little later."""

import contextlib
import errno
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

_FIRST_PORT = 20000
# SGLang 0.5.23 derives further ports with DP attention (srt/server_args.py): six after the port
# where ranks meet, which on a single node is 233 after the server's own, and one for the handshake
# 13 after either.
_DERIVED_PORTS = (*range(7), 13, *range(233, 240), 246)
RESERVED_S = 60.0
"""So long at least no other caller gets a port that was found: its server binds it within that."""


def find_free_port(host: str) -> int:
    """Return a port nobody listens on, below the range that outgoing connections use.

    The server binds it seconds later, when a port from bind(0) could be taken again. Until then no
    other caller on this machine gets it. The ports that SGLang derives from it are free and below
    that range as well. Raises RuntimeError if 64 tries find none.
    """
    port_range = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    ephemeral_start = int(port_range.split()[0])
    end = max(ephemeral_start - max(_DERIVED_PORTS), _FIRST_PORT + 1)
    for port in random.SystemRandom().sample(range(_FIRST_PORT, end), min(64, end - _FIRST_PORT)):
        wanted = [port + derived for derived in _DERIVED_PORTS]
        if _reservations.add(wanted) and all(is_free(host, each) for each in wanted):
            return port
    raise RuntimeError(f"no free port between {_FIRST_PORT} and {ephemeral_start} on {host}")


def is_free(host: str, port: int) -> bool:
    """Return whether a server could bind this port now."""
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind((host, port))
        return True
    return False


class _Reservations:
    """Ports that this process has chosen and its servers have perhaps not bound yet.

    Each is the name of a socket in Linux's abstract namespace. There only one socket has a name,
    whoever the users are, and the namespace belongs to the same network as the ports. The kernel
    frees the names of a process that ends.
    """

    def __init__(self) -> None:
        self._held: deque[tuple[float, ExitStack]] = deque()
        self._lock = threading.Lock()

    def add(self, ports: Sequence[int]) -> bool:
        """Reserve these ports for RESERVED_S; return False if one is reserved already."""
        with self._lock, ExitStack() as names:
            self._drop_old()
            for port in ports:
                name = names.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
                try:
                    name.bind(f"\0mcore_rl_port_{port}")
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                    return False
            self._held.append((time.monotonic(), names.pop_all()))
        return True

    def _drop_old(self) -> None:
        while self._held and time.monotonic() - self._held[0][0] > RESERVED_S:
            self._held.popleft()[1].close()


_reservations = _Reservations()
