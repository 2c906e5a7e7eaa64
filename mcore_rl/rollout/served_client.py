"""Posts JSON bodies to a served model and returns its JSON answer, or an exception, for each."""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from mcore_rl.process.errors import describe_error
from mcore_rl.process.http import open_session
from mcore_rl.process.log_files import LogThrottle
from mcore_rl.rollout.engine_spec import EngineAddress
from mcore_rl.rollout.served_endpoint import ServedEndpoint

_log = logging.getLogger(__name__)
_FIRST_BACKOFF_S = 0.25
_LONGEST_BACKOFF_S = 8.0
_SHOWN_CHARS = 500


class ServedRequestError(RuntimeError):
    """A request to a served model failed for good; the message names role and server."""


class _Transient(Exception):
    """A failure worth another try."""


class ServedClient:
    """Spreads requests over a served model's engines, least loaded first, with retries.

    A request is retried until the model's request_timeout_s is over.
    """

    def __init__(self, endpoint: ServedEndpoint) -> None:
        self._endpoint = endpoint
        self._in_flight = {engine.url: 0 for engine in endpoint.engines}
        self._throttle = LogThrottle()

    async def post_all(self, path: str, bodies: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return, in the order of `bodies`, each answer's JSON or the ServedRequestError it ended
        in.

        Lost connections, HTTP 429 and 5xx are retried, and so are requests while no engine serves.
        Other statuses are not.
        """
        endpoint = self._endpoint
        slots = asyncio.Semaphore(endpoint.config.max_concurrency * len(endpoint.engines))
        async with open_session(None, endpoint.headers) as session:
            return await asyncio.gather(
                *(self._post_in_time(session, slots, path, body) for body in bodies)
            )

    async def _post_in_time(
        self,
        session: aiohttp.ClientSession,
        slots: asyncio.Semaphore,
        path: str,
        body: Mapping[str, Any],
    ) -> Any:
        role = self._endpoint.role
        timeout_s = self._endpoint.config.request_timeout_s
        reasons = ["no answer"]
        async with slots:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._post_until_answered(session, path, body, reasons)
            except ServedRequestError as error:
                return error
            except TimeoutError:
                return ServedRequestError(
                    f"{role}.request_timeout_s={timeout_s:g} is over; last: {reasons[-1]}"
                )

    async def _post_until_answered(
        self,
        session: aiohttp.ClientSession,
        path: str,
        body: Mapping[str, Any],
        reasons: list[str],
    ) -> Any:
        """Post until an engine answers; the reason of each failure is appended to `reasons`."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                return await self._post(session, path, body)
            except (aiohttp.ClientError, _Transient) as failure:
                reasons.append(describe_error(failure))
            if self._throttle.is_due():
                _log.info(
                    "%s: a request failed with %s%s; trying again",
                    self._endpoint.role,
                    reasons[-1],
                    self._throttle.describe_held(),
                )
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)

    async def _post(
        self, session: aiohttp.ClientSession, path: str, body: Mapping[str, Any]
    ) -> Any:
        engine = self._pick()
        self._in_flight[engine.url] += 1
        try:
            with_model = {"model": self._endpoint.model, **body}
            async with session.post(f"{engine.url}{path}", json=with_model) as response:
                text = await response.text()
        finally:
            self._in_flight[engine.url] -= 1
        if response.status == 429 or response.status >= 500:
            raise _Transient(f"{engine}: HTTP {response.status}: {text[:_SHOWN_CHARS]}")
        where = f"{self._endpoint.role}, {engine}"
        if response.status != 200:
            raise ServedRequestError(f"{where}: HTTP {response.status}: {text[:_SHOWN_CHARS]}")
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ServedRequestError(f"{where}: no JSON ({error}): {text[:_SHOWN_CHARS]}") from None

    def _pick(self) -> EngineAddress:
        """Return the serving engine with the fewest requests; raises _Transient if none serves."""
        health = self._endpoint.health
        engines = self._endpoint.engines
        serving = [engine for engine in engines if not health.why_out(engine.url)]
        if not serving:
            reasons = "; ".join(f"{engine}: {health.why_out(engine.url)}" for engine in engines)
            raise _Transient(f"no engine serves: {reasons}")
        return min(serving, key=lambda engine: self._in_flight[engine.url])
