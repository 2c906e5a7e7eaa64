"""Watches how much of their KV cache the engines have free, and admits requests by it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

import aiohttp

from mcore_rl.process.server_keys import user_headers
from mcore_rl.rollout.engine_health import EngineHealth, EngineLoad
from mcore_rl.rollout.engine_spec import EngineAddress

_log = logging.getLogger(__name__)
_ASK_S = 5.0
_POLL_S = 0.05

AskFreeKv = Callable[[EngineAddress], Awaitable[float | None]]
"""Returns the free share, 0 to 1, of an engine's KV cache; None: the engine does not tell."""


async def ask_free_kv(http: aiohttp.ClientSession, engine: EngineAddress) -> float | None:
    """Return the free share of the KV cache of the engine's fullest data-parallel rank.

    Requests that wait in the engine count with their tokens, and with as many to come as the
    running ones have on average. None: it does not tell.
    """
    try:
        return max(0.0, 1.0 - max(map(_compute_taken, await _ask_loads(http, engine))))
    except (aiohttp.ClientError, TimeoutError, ArithmeticError, LookupError) as error:
        _log.debug("%s does not tell its load: %r", engine, error)
        return None
    except (TypeError, ValueError) as error:
        _log.debug("%s tells no load that can be read: %r", engine, error)
        return None


async def count_requests(http: aiohttp.ClientSession, engine: EngineAddress) -> int | None:
    """Return the requests that run or wait in an engine; None: it does not tell."""
    try:
        loads = await _ask_loads(http, engine)
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)
    except (aiohttp.ClientError, TimeoutError, LookupError, TypeError, ValueError) as error:
        _log.debug("%s does not tell its requests: %r", engine, error)
        return None


async def _ask_loads(http: aiohttp.ClientSession, engine: EngineAddress) -> list[Mapping[str, int]]:
    """Return the load of each data-parallel rank of an engine."""
    timeout = aiohttp.ClientTimeout(_ASK_S)
    url = f"{engine.url}/v1/loads?include=core"
    async with http.get(url, headers=user_headers(engine.keys), timeout=timeout) as response:
        response.raise_for_status()
        return (await response.json())["loads"]


def _compute_taken(load: Mapping[str, int]) -> float:
    """Return the taken share of a data-parallel rank's KV cache, as SGLang tells its load."""
    per_request = load["num_used_tokens"] / max(load["num_running_reqs"], 1)
    to_come = load["num_waiting_reqs"] * per_request
    return (load["num_total_tokens"] + to_come) / load["max_total_num_tokens"]


class FreeKvMonitor:
    """The free share of each engine's KV cache, asked for every `every_s` seconds."""

    def __init__(
        self,
        ask: AskFreeKv,
        engines: Sequence[EngineAddress],
        health: EngineHealth,
        every_s: float = 1.0,
        home: int | None = None,
    ) -> None:
        """`home`: collector whose engines are watched that join later; None: all that join."""
        self._home = home
        self._ask = ask
        self._engines = list(engines)
        self._health = health
        self._every_s = every_s
        self._free: dict[str, float | None] = {}

    def free(self, url: str) -> float | None:
        """Return an engine's share, without what it was given since it told; None: not known."""
        return self._free.get(url)

    def take(self, url: str, share: float) -> None:
        """Count a request that goes to an engine as taken, until the engine tells again."""
        free = self._free.get(url)
        if free is not None:
            self._free[url] = free - share

    def most_free(self) -> float | None:
        """Return the largest share, 0 to 1, of any engine; None if one does not tell.

        Engines out of rotation do not count.
        """
        shares = [
            self._free.get(engine.url)
            for engine in self._list_current()
            if not self._health.why_out(engine.url)
        ]
        known = [share for share in shares if share is not None]
        return max(known) if known and len(known) == len(shares) else None

    async def watch(self) -> None:
        """Ask the engines until it is canceled; one that does not answer is not known."""
        while True:
            engines = self._list_current()
            shares = await asyncio.gather(*map(self._ask, engines))
            for engine, share in zip(engines, shares, strict=True):
                if share is None and self._free.get(engine.url, 0.0) is not None:
                    _log.warning("%s does not tell how much of its KV cache is free", engine)
                self._free[engine.url] = share
            await asyncio.sleep(self._every_s)

    def _list_current(self) -> list[EngineAddress]:
        return self._health.list_current(self._engines, self._home)


class KvAdmission:
    """Holds requests back, first come first served, while all KV caches are too full."""

    def __init__(
        self,
        monitor: FreeKvMonitor,
        list_engines: Callable[[], Sequence[EngineLoad]],
        min_free: float,
        kv_len: int,
    ) -> None:
        """`min_free` is the free share that an engine needs; `kv_len` the tokens of its cache."""
        self._monitor = monitor
        self._list_engines = list_engines
        self._min_free = min_free
        self._kv_len = kv_len
        self._turn = asyncio.Lock()

    async def wait(self, may_post: asyncio.Event) -> None:
        """Return once a request may be posted; it is posted before anything else is awaited."""
        async with self._turn:
            while True:
                await may_post.wait()
                if self._has_free_kv():
                    return
                await asyncio.sleep(_POLL_S)

    def choose_with_free_kv(self, engines: Sequence[EngineLoad]) -> Sequence[EngineLoad]:
        """Return the engines whose free share is large enough or unknown; all if there is none."""
        found = [e for e in engines if self._is_free(self._monitor.free(e.address.url))]
        return found or engines

    def take(self, engine: EngineLoad, num_tokens: int) -> None:
        """Count a request of so many tokens that goes to `engine`."""
        self._monitor.take(engine.address.url, num_tokens / self._kv_len)

    def _has_free_kv(self) -> bool:
        # Whatever the engines say, one request goes on: they may count what nobody uses any more.
        is_idle = not any(engine.num_in_flight for engine in self._list_engines())
        return is_idle or self._is_free(self._monitor.most_free())

    def _is_free(self, share: float | None) -> bool:
        return share is None or share >= self._min_free
