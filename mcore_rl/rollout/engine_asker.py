"""Asks any serving engine about a text: what SGLang's parsers make of it."""

from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from mcore_rl.process.errors import describe_error
from mcore_rl.process.server_keys import user_headers
from mcore_rl.rollout.engine_health import EngineHealth
from mcore_rl.rollout.engine_spec import EngineAddress
from mcore_rl.rollout.transport import RolloutError


class EngineAsker:
    """Posts to the engines in turn; one that fails is passed over for the next."""

    def __init__(
        self, http: aiohttp.ClientSession, engines: Sequence[EngineAddress], health: EngineHealth
    ) -> None:
        """`http` has the deadline of each request."""
        self._http = http
        self._engines = list(engines)
        self._health = health

    async def __call__(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the JSON that an engine answers.

        Raises ValueError if it refuses or its parser fails, RolloutError if no engine answers.
        """
        failures = []
        for engine in self._in_turn():
            try:
                return await self._post(engine, path, body)
            except (aiohttp.ClientError, TimeoutError) as failure:
                silent = f"no answer within {self._http.timeout.total} s"
                failures.append(f"{engine}: {describe_error(failure, silent)}")
        raise RolloutError(f"no engine answers {path}: {'; '.join(failures) or 'none serves'}")

    def _in_turn(self) -> list[EngineAddress]:
        """Return the engines that serve, another one first each time."""
        self._engines.append(self._engines.pop(0))
        return [engine for engine in self._engines if not self._health.why_out(engine.url)]

    async def _post(
        self, engine: EngineAddress, path: str, body: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        headers = user_headers(engine.keys)
        url = f"{engine.url}{path}"
        async with self._http.post(url, json=body, headers=headers) as response:
            if response.status != 200:
                text = (await response.text())[:500]
                raise ValueError(f"{engine} answers {path} with HTTP {response.status}: {text}")
            return await response.json()
