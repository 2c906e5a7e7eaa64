"""Finds a port on a host that a server can bind a little later."""

import contextlib
import random
import socket
from pathlib import Path

_FIRST_PORT = 20000
# SGLang 0.5.23 derives further ports with DP attention (srt/server_args.py): six after the port
# where ranks meet, which on a single node is 233 after the server's own, and one for the handshake
# 13 after either.
_DERIVED_PORTS = (*range(7), 13, *range(233, 240), 246)


def find_free_port(host: str) -> int:
    """Return a port nobody listens on, below the range that outgoing connections use.

    The server binds it seconds later, when a port from bind(0) could be taken again. The ports that
    SGLang derives from it are free and below that range as well. Raises RuntimeError if 64 tries
    find none.
    """
    port_range = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    ephemeral_start = int(port_range.split()[0])
    end = max(ephemeral_start - max(_DERIVED_PORTS), _FIRST_PORT + 1)
    for port in random.SystemRandom().sample(range(_FIRST_PORT, end), min(64, end - _FIRST_PORT)):
        if all(is_free(host, port + derived) for derived in _DERIVED_PORTS):
            return port
    raise RuntimeError(f"no free port between {_FIRST_PORT} and {ephemeral_start} on {host}")


def is_free(host: str, port: int) -> bool:
    """Return whether a server could bind this port now."""
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind((host, port))
        return True
    return False
