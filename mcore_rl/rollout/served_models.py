"""Finds the served models of a run, and posts requests to them.

A served model is one that runs beside the policy: a judge, a reward model or a teacher. Its engines
are started by the run (`path`) or run already (`url`).

options -> dtype, endpoint (addresses, model name, key) -> JSON bodies -> JSON answers or exceptions
"""

import asyncio
import json
import logging
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from mcore_rl.config import ServedModelConfig
from mcore_rl.process.errors import describe_error
from mcore_rl.process.http import open_session
from mcore_rl.process.log_files import LogThrottle
from mcore_rl.process.network import open_directly
from mcore_rl.process.server_keys import bearer
from mcore_rl.rollout.engine_health import EngineHealth
from mcore_rl.rollout.engine_spec import EngineAddress
from mcore_rl.weights.hf.config import parse_hf_config, read_named_dtype, with_text_settings

SERVED_DTYPES = ("float32", "bfloat16", "float16")
_SHORT = {"float": "float32", "half": "float16"}


TEXT_ROLES = ("judge",)
"""Roles that get text instead of token ids; their servers need tokenizer and chat template."""
_REMOTE_LOG = "on its own machine"
_log = logging.getLogger(__name__)
_FIRST_BACKOFF_S = 0.25
_LONGEST_BACKOFF_S = 8.0
_SHOWN_CHARS = 500


def find_dtype(dtype: str, model_path: Path, option: str) -> str:
    """Return `dtype`, or for "auto" the one that config.json in `model_path` names.

    SGLang's own "auto" would serve float32 as float16.

    Raises ValueError, which names `option`, if config.json names none that a model is served in.
    """
    if dtype != "auto":
        return dtype
    config = with_text_settings(parse_hf_config(model_path))
    named = str(read_named_dtype(config)).removeprefix("torch.")
    found = _SHORT.get(named, named)
    if found not in SERVED_DTYPES:
        raise ValueError(
            f"{option}=auto: {model_path / 'config.json'} names the dtype {named}; set {option} to"
            f" one of {', '.join(SERVED_DTYPES)}"
        )
    return found


@dataclass(frozen=True)
class ServedEndpoint:
    """Where a served model answers.

    role      judge, reward_model or teacher: the config group, which messages name
    engines   its servers; requests go to those that `health` says serve
    model     the model's name in requests to OpenAI-compatible endpoints
    api_key   empty if none is needed
    """

    role: str
    config: ServedModelConfig
    engines: tuple[EngineAddress, ...]
    health: EngineHealth
    model: str
    api_key: str = field(default="", repr=False)

    @property
    def headers(self) -> dict[str, str]:
        return bearer(self.api_key)


def check_served_path(role: str, config: ServedModelConfig) -> None:
    """Raise ValueError if no engine can be started on `config.path`, in the dtype that it names."""
    folder = Path(config.path)
    needed = ["config.json"]
    if role in TEXT_ROLES:
        needed.append("tokenizer_config.json")
    for name in needed:
        if not (folder / name).is_file():
            raise ValueError(
                f"{role}.path={config.path}: there is no {name}; name a HuggingFace directory"
            )
    find_dtype(config.dtype, folder, f"{role}.dtype")


def find_endpoint(role: str, config: ServedModelConfig) -> ServedEndpoint:
    """Return the server at `config.url`, which must answer within request_timeout_s.

    Raises ValueError if the server does not list its models, has none of the wanted name, or if the
    environment variable with its key is not set.
    """
    url = config.url.rstrip("/").removesuffix("/v1")
    key = os.environ.get(config.api_key_env, "") if config.api_key_env else ""
    if config.api_key_env and not key:
        raise ValueError(
            f"{role}.api_key_env={config.api_key_env}: there is no such environment variable"
        )
    names = _list_models(f"{url}/v1/models", role, config, key)
    if not names or config.url_model not in ("", *names):
        raise ValueError(
            f"{role}.url={config.url}: it has no model {config.url_model!r}, but"
            f" {', '.join(names) or 'none'}; set {role}.url_model"
        )
    return ServedEndpoint(
        role,
        config,
        engines=(EngineAddress(url, _REMOTE_LOG),),
        health=EngineHealth([url]),
        model=config.url_model or names[0],
        api_key=key,
    )


def _list_models(url: str, role: str, config: ServedModelConfig, key: str) -> list[str]:
    request = urllib.request.Request(url, headers=bearer(key))
    try:
        with open_directly(request, config.request_timeout_s) as response:
            return [str(entry["id"]) for entry in json.load(response)["data"]]
    except (urllib.error.URLError, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{role}.url={config.url}: GET {url} does not list models: {describe_error(error)}"
        ) from None


class ServedRequestError(RuntimeError):
    """A request to a served model failed for good; the message names role and server."""


class _TransientError(Exception):
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
            except (aiohttp.ClientError, _TransientError) as failure:
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
            raise _TransientError(f"{engine}: HTTP {response.status}: {text[:_SHOWN_CHARS]}")
        where = f"{self._endpoint.role}, {engine}"
        if response.status != 200:
            raise ServedRequestError(f"{where}: HTTP {response.status}: {text[:_SHOWN_CHARS]}")
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ServedRequestError(f"{where}: no JSON ({error}): {text[:_SHOWN_CHARS]}") from None

    def _pick(self) -> EngineAddress:
        """Return the serving engine with the fewest requests; raise _TransientError without one."""
        health = self._endpoint.health
        engines = self._endpoint.engines
        serving = [engine for engine in engines if not health.why_out(engine.url)]
        if not serving:
            reasons = "; ".join(f"{engine}: {health.why_out(engine.url)}" for engine in engines)
            raise _TransientError(f"no engine serves: {reasons}")
        return min(serving, key=lambda engine: self._in_flight[engine.url])
