"""Async client of a served model: JSON bodies in, an answer or an exception for each out."""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from mcore_rl.process.http import open_session
from mcore_rl.rollout.engine import EngineAddress
from mcore_rl.rollout.served_endpoint import ServedEndpoint

_log = logging.getLogger(__name__)
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.25, 8.0
_SHOWN_CHARS = 500


class ServedRequestError(RuntimeError):
    """A request failed for good; the message names role and server."""


class _Transient(Exception):
    """A failure worth another try."""


class ServedClient:
    """Spreads requests over a model's engines, least loaded first; retries until a request's time is up."""

    def __init__(self, model: ServedEndpoint) -> None:
        self._model = model
        self._in_flight = {engine.url: 0 for engine in model.engines}

    async def post_all(self, path: str, bodies: Sequence[Mapping[str, Any]]) -> list[Any]:
        """In their order, each answer's JSON or the ServedRequestError that the request came to.

        Lost connections, HTTP 429 and 5xx are tried again, also while no engine serves; others are not.
        """
        slots = asyncio.Semaphore(self._model.config.max_concurrency * len(self._model.engines))
        async with open_session(None, self._model.headers) as session:
            return await asyncio.gather(*(self._one(session, slots, path, body) for body in bodies))

    async def _one(
        self,
        session: aiohttp.ClientSession,
        slots: asyncio.Semaphore,
        path: str,
        body: Mapping[str, Any],
    ) -> Any:
        timeout_s, reason, role = (
            self._model.config.request_timeout_s,
            "no answer",
            self._model.role,
        )
        async with slots:
            try:
                async with asyncio.timeout(timeout_s):
                    pause_s = _FIRST_BACKOFF_S
                    while True:
                        try:
                            return await self._post(session, path, body)
                        except (aiohttp.ClientError, _Transient) as failure:
                            reason = f"{type(failure).__name__}: {failure}"
                        _log.info("%s: a request failed with %s; trying again", role, reason)
                        await asyncio.sleep(pause_s)
                        pause_s = min(2 * pause_s, _LONGEST_BACKOFF_S)
            except ServedRequestError as error:
                return error
            except TimeoutError:
                return ServedRequestError(
                    f"{role}.request_timeout_s={timeout_s:g} is over; last: {reason}"
                )

    async def _post(
        self, session: aiohttp.ClientSession, path: str, body: Mapping[str, Any]
    ) -> Any:
        engine = self._pick()
        self._in_flight[engine.url] += 1
        try:
            named = {"model": self._model.model, **body}
            async with session.post(f"{engine.url}{path}", json=named) as response:
                text = await response.text()
        finally:
            self._in_flight[engine.url] -= 1
        if response.status == 429 or response.status >= 500:
            raise _Transient(f"{engine}: HTTP {response.status}: {text[:_SHOWN_CHARS]}")
        if response.status != 200:
            raise ServedRequestError(
                f"{self._model.role}, {engine}: HTTP {response.status}: {text[:_SHOWN_CHARS]}"
            )
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ServedRequestError(
                f"{self._model.role}, {engine}: no JSON ({error}): {text[:_SHOWN_CHARS]}"
            ) from None

    def _pick(self) -> EngineAddress:
        health = self._model.health
        serving = [engine for engine in self._model.engines if not health.why_out(engine.url)]
        if not serving:
            reasons = "; ".join(f"{e}: {health.why_out(e.url)}" for e in self._model.engines)
            raise _Transient(f"no engine serves: {reasons}")
        return min(serving, key=lambda engine: self._in_flight[engine.url])
