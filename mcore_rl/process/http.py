"""Opens HTTP sessions for SGLang servers."""

from collections.abc import Mapping

import aiohttp

_KEEPALIVE_S = 2.0
"""Below the 5 s after which SGLang closes an idle connection, so no request meets the closing."""


def open_session(
    timeout_s: float | None, headers: Mapping[str, str] | None = None
) -> aiohttp.ClientSession:
    """Return a session without a bound on connections, to be used in `async with`.

    `timeout_s` is the deadline of each request; None sets none.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)
