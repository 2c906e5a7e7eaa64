"""Watches how much of their KV cache the engines have free."""

import asyncio
import logging
from collections.abc import Sequence

import aiohttp

from mcore_rl.process.server_keys import user_headers
from mcore_rl.rollout.engine_health import EngineHealth
from mcore_rl.rollout.engine_spec import EngineAddress

_log = logging.getLogger(__name__)
_ASK_S = 5.0


class EngineRoom:
    """The free share of each engine's KV cache, asked for every `every_s` seconds."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        engines: Sequence[EngineAddress],
        health: EngineHealth,
        every_s: float = 1.0,
    ) -> None:
        self._http = http
        self._engines = list(engines)
        self._health = health
        self._every_s = every_s
        self._free: dict[str, float | None] = {}

    def most_free(self) -> float | None:
        """Return the share, 0 to 1, of the engine with most room; None if one does not tell.

        Engines out of rotation do not count.
        """
        shares = [
            self._free.get(engine.url)
            for engine in self._engines
            if not self._health.why_out(engine.url)
        ]
        known = [share for share in shares if share is not None]
        return max(known) if known and len(known) == len(shares) else None

    async def watch(self) -> None:
        """Ask the engines until it is canceled; one that does not answer is not known."""
        while True:
            shares = await asyncio.gather(*map(self._ask, self._engines))
            urls = [engine.url for engine in self._engines]
            self._free = dict(zip(urls, shares, strict=True))
            await asyncio.sleep(self._every_s)

    async def _ask(self, engine: EngineAddress) -> float | None:
        """Return the free share of the engine's fullest data-parallel rank."""
        timeout = aiohttp.ClientTimeout(_ASK_S)
        url = f"{engine.url}/v1/loads?include=core"
        headers = user_headers(engine.keys)
        try:
            async with self._http.get(url, headers=headers, timeout=timeout) as response:
                response.raise_for_status()
                loads = (await response.json())["loads"]
                return 1.0 - max(float(load["token_usage"]) for load in loads)
        except (aiohttp.ClientError, TimeoutError, LookupError, TypeError, ValueError) as error:
            if self._free.get(engine.url, 0.0) is not None:
                _log.warning("%s does not tell its load: %r", engine, error)
            return None
