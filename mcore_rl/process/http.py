"""Connections to SGLang servers."""

from collections.abc import Mapping

import aiohttp

_KEEPALIVE_S = 2.0
"""Below the 5 s after which SGLang closes an idle connection, lest a request meets the closing."""


def open_session(
    timeout_s: float | None, headers: Mapping[str, str] | None = None
) -> aiohttp.ClientSession:
    """Use it as `async with`; any number of connections. `timeout_s`: of each request, None for none."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)
