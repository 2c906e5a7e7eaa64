"""Opens HTTP sessions for SGLang servers."""

import socket
from collections.abc import Mapping

import aiohttp

_KEEPALIVE_S = 2.0
"""Below the 5 s after which SGLang closes an idle connection, so no request meets the closing."""


_PROBES = {
    socket.TCP_KEEPIDLE: 30,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 3,
}
"""After 30 silent seconds the other end is asked three times, 10 s apart, whether it is there."""


def open_session(
    timeout_s: float | None, headers: Mapping[str, str] | None = None
) -> aiohttp.ClientSession:
    """Return a session without a bound on connections, to be used in `async with`.

    `timeout_s` is the deadline of each request; None sets none. A request fails earlier, within
    about a minute, if the machine at the other end is gone without a word.
    """
    connector = aiohttp.TCPConnector(
        limit=0, keepalive_timeout=_KEEPALIVE_S, socket_factory=_probing_socket
    )
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)


def _probing_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _PROBES.items():
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made
