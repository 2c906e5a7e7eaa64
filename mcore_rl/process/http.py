"""Opens HTTP sessions for SGLang servers."""

import socket
from collections.abc import Mapping

import aiohttp

_KEEPALIVE_S = 2.0
"""SGLang closes an idle connection after 5 s; this is less, so that no request is cut off."""


_PROBES = {
    socket.TCP_KEEPIDLE: 30,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 3,
}
"""After 30 s of silence TCP probes the other end three times, 10 s apart."""


def open_session(
    timeout_s: float | None, headers: Mapping[str, str] | None = None
) -> aiohttp.ClientSession:
    """Return a session with any number of connections, for use in `async with`.

    `timeout_s` is the deadline of each request; None sets none. If the other machine is gone
    without closing the connection, a request fails earlier, within about a minute.
    """
    connector = aiohttp.TCPConnector(
        limit=0, keepalive_timeout=_KEEPALIVE_S, socket_factory=_open_probing_socket
    )
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)


def _open_probing_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _PROBES.items():
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made
