"""Ports to listen on that nothing else takes meanwhile."""

import contextlib
import random
import socket
from pathlib import Path

_FIRST_PORT = 20000
#: Ports SGLang 0.5.23 derives with DP attention: six after the one where ranks meet, which on a single node
#: is 233 after the server's own, and one for the handshake 13 after either (srt/server_args.py).
_DERIVED_PORTS = (*range(7), 13, *range(233, 240), 246)


def find_free_port(host: str) -> int:
    """A port nobody listens on, below the range from which the kernel serves outgoing connections.

    The server binds it only seconds later; a port from bind(0) could be taken by then. The ports that the
    server derives from it are free and below that range as well.
    """
    ephemeral_start = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    end = max(ephemeral_start - max(_DERIVED_PORTS), _FIRST_PORT + 1)
    for port in random.SystemRandom().sample(range(_FIRST_PORT, end), min(64, end - _FIRST_PORT)):
        if all(_is_free(host, port + derived) for derived in _DERIVED_PORTS):
            return port
    raise RuntimeError(f"no free port between {_FIRST_PORT} and {ephemeral_start} on {host}")


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind((host, port))
        return True
    return False
