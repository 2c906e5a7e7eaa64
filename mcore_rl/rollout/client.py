"""Async client of the engines: prompts in, samples out (token ids, log-probs, weight versions)."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from statistics import fmean
from typing import Any

import aiohttp

from mcore_rl.config import RolloutConfig
from mcore_rl.process.http import open_session
from mcore_rl.rollout.engine import EngineAddress
from mcore_rl.rollout.engine_health import EngineHealth
from mcore_rl.rollout.request import Group, Request, Sampling, make_body, make_sample
from mcore_rl.rollout.routed_experts import RoutedExpertsShape
from mcore_rl.types import Prompt, Sample

_log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.25
_HOLD_POLL_S = 0.02
_ABORT_S = 10.0


class RolloutError(RuntimeError):
    """An engine failed a request for good; the message names the engine, its log file and the prompt."""


class _Transient(Exception):
    """A failure worth another try."""


class _Aborted(_Transient):
    """The engine ended the request."""


class _Engine:
    """An engine and its requests; `idle` holds the seconds without any, and since when there are none."""

    def __init__(self, address: EngineAddress) -> None:
        self.address, self.num_in_flight = address, 0
        self._idle: tuple[float, float | None] = (0.0, time.monotonic())

    @contextmanager
    def request(self) -> Iterator[None]:
        idle_s, since_s = self._idle
        if since_s is not None:
            self._idle = idle_s + time.monotonic() - since_s, None
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1
            if not self.num_in_flight:
                self._idle = self._idle[0], time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds without a request, so far; may be asked from another thread."""
        idle_s, since_s = self._idle
        return idle_s if since_s is None else idle_s + time.monotonic() - since_s


class RolloutClient:
    """Spreads requests over engines: bounded concurrency, least loaded first, another engine on failure."""

    def __init__(
        self,
        engines: Sequence[EngineAddress],
        config: RolloutConfig,
        stop_token_ids: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        experts_shape: RoutedExpertsShape | None = None,
        health: EngineHealth | None = None,
    ) -> None:
        """`experts_shape`: of what engines tell of the experts that they chose, if they do.
        `health`: which engines serve, asked before each request; None: all of them, always.
        """
        if not engines:
            raise ValueError("RolloutClient needs at least one engine")
        self._health = health or EngineHealth([address.url for address in engines])
        self._engines = [_Engine(address) for address in engines]
        self._config = config
        self._stop_token_ids = list(stop_token_ids)
        self._decode = decode
        self._experts_shape = experts_shape

    @property
    def max_in_flight(self) -> int:
        """Requests at once, all engines together."""
        return self._config.max_concurrency * len(self._engines)

    @property
    def idle_s(self) -> float:
        """Seconds without a request so far, mean over the engines."""
        return fmean(engine.idle_s for engine in self._engines)

    async def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[Sample]:
        """`RolloutSession.generate` in a session of its own."""
        async with self.open() as session:
            return await session.generate(prompts, num_samples, sampling)

    @asynccontextmanager
    async def open(
        self, max_in_flight: int = 0, on_done: Callable[[], None] = lambda: None
    ) -> "AsyncIterator[RolloutSession]":
        """Connections to the engines, closed with the block.

        `max_in_flight`: requests at once, all engines together; 0: as many as they take. `on_done`: called
        when a request was answered for good.
        """
        async with open_session(self._config.request_timeout_s) as http:
            yield RolloutSession(self, http, max_in_flight or self.max_in_flight, on_done)

    async def one(self, session: "RolloutSession", request: Request, sampling: Sampling) -> Sample:
        """One sample, with its retries. What the session itself cut off is sampled again, which is none."""
        answerable = replace(
            sampling,
            seed=sampling.seed if self._config.deterministic else None,
            routed_experts=sampling.routed_experts and self._experts_shape is not None,
        )
        body = make_body(request, answerable, self._stop_token_ids)
        experts_shape = self._experts_shape if sampling.routed_experts else None
        failed: list[_Engine] = []
        while True:
            async with session.slot():
                engine = self._pick(request, failed)
                try:
                    answer = await self._post(session.http, engine, body)
                    return make_sample(request, answer, self._decode, experts_shape)
                except (aiohttp.ClientError, TimeoutError, _Transient) as failure:
                    if session.is_held and isinstance(failure, _Aborted):
                        session.num_cut_off += 1
                        continue
                    failed.append(engine)
                    reason = f"{type(failure).__name__}: {failure}"
            if len(failed) > self._config.retries:
                raise RolloutError(
                    f"{engine.address}: {request} failed {len(failed)} times, last with {reason}"
                )
            _log.warning("%s: %s failed with %s; trying again", engine.address, request, reason)
            await asyncio.sleep(_FIRST_BACKOFF_S * 2 ** (len(failed) - 1))

    async def abort_all(self, http: aiohttp.ClientSession) -> None:
        """Have the engines end what they were asked; requests tell of an engine that does not answer."""
        for engine in self._engines:
            if engine.num_in_flight:
                url, timeout = (
                    f"{engine.address.url}/abort_request",
                    aiohttp.ClientTimeout(_ABORT_S),
                )
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with http.post(url, json={"abort_all": True}, timeout=timeout):
                        pass

    def _pick(self, request: Request, failed: Sequence[_Engine]) -> _Engine:
        """The engine of the prompt's other samples, which caches the prompt, unless it is too loaded."""
        in_rotation = [e for e in self._engines if not self._health.why_out(e.address.url)]
        if not in_rotation:
            reasons = "; ".join(
                f"{e.address}: {self._health.why_out(e.address.url)}" for e in self._engines
            )
            raise RolloutError(f"no engine in rotation for {request}: {reasons}")
        candidates = [engine for engine in in_rotation if engine not in failed] or in_rotation
        least_loaded = min(candidates, key=lambda engine: engine.num_in_flight)
        home = request.group.home
        slack = request.group.num_samples
        if home in candidates and home.num_in_flight < least_loaded.num_in_flight + slack:
            return home
        request.group.home = least_loaded
        return least_loaded

    async def _post(
        self, http: aiohttp.ClientSession, engine: _Engine, body: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The engine's answer; raises _Transient or aiohttp's errors where another try may help."""
        with engine.request():
            async with http.post(f"{engine.address.url}/generate", json=body) as response:
                text = await response.text()
        if response.status >= 500:
            raise _Transient(f"HTTP {response.status}: {text[:500]}")
        if response.status != 200:
            raise RolloutError(
                f"{engine.address} refused a request with HTTP {response.status}: {text[:500]}"
            )
        answer = json.loads(text)
        reason = answer["meta_info"]["finish_reason"]
        if reason["type"] == "abort":
            raise _Aborted(f"aborted: {reason.get('message')}")
        return answer


class RolloutSession:
    """Requests that share connections and, over all calls, a bound; they can be held while weights change."""

    def __init__(
        self,
        client: RolloutClient,
        http: aiohttp.ClientSession,
        max_in_flight: int,
        on_done: Callable[[], None],
    ) -> None:
        self._client, self.http, self._on_done = client, http, on_done
        self._slots = asyncio.Semaphore(max_in_flight)
        self._may_go = asyncio.Event()
        self._may_go.set()
        self._num_posted = 0
        self.num_open = 0
        """Samples begun and not done."""
        self.num_cut_off = 0
        """Responses that were cut off half-way, to be sampled again."""

    @property
    def is_held(self) -> bool:
        return not self._may_go.is_set()

    async def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[Sample]:
        """`num_samples` samples of each prompt, grouped by prompt in the order of `prompts`.

        Connection losses, timeouts and aborted requests are tried again, on another engine if there is one.
        Raises RolloutError for a request that fails config.retries + 1 times, and then cancels the others.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                started = [
                    self._begin(tasks, Request(prompt, index, group), sampling)
                    for prompt in prompts
                    for group in [Group(num_samples)]
                    for index in range(num_samples)
                ]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in started]

    def _begin(
        self, tasks: asyncio.TaskGroup, request: Request, sampling: Sampling
    ) -> asyncio.Task[Sample]:
        def done(task: asyncio.Task[Sample]) -> None:
            self.num_open -= 1
            self._on_done()

        self.num_open += 1
        task = tasks.create_task(self._client.one(self, request, sampling))
        task.add_done_callback(done)
        return task

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Room for one request more, once none of them is held."""
        async with self._slots:
            while self.is_held:
                await self._may_go.wait()
            self._num_posted += 1
            try:
                yield
            finally:
                self._num_posted -= 1

    async def hold(self, *, cut_off: bool) -> None:
        """Send nothing more; return once nothing is under way. `cut_off`: what is, ends at once.

        Each request has its own deadline, so this ends.
        """
        self._may_go.clear()
        while self._num_posted:
            if cut_off:  # again: one that was on its way is at its engine by now
                await self._client.abort_all(self.http)
            await asyncio.sleep(_HOLD_POLL_S)

    def resume(self) -> None:
        self._may_go.set()
