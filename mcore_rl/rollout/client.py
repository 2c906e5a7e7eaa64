"""Sends prompts to the engines and returns samples (token ids, log-probs, weight versions).

session: one bound, one connection            engines, shared by all sessions
request --wait for a slot--> pick an engine --> transport --> sample
   ^                                               |
   +--on a failure, after a hold, when it moves----+

A response that is under way may move from an engine with many requests to one with few
(migration.py), and go on elsewhere if its engine is lost (streamed_answer.py).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from statistics import fmean
from typing import Any

from mcore_rl.config import RolloutConfig
from mcore_rl.rollout.drafts import DraftCounter, DraftCounts
from mcore_rl.rollout.engine_health import EngineHealth, EngineLoad
from mcore_rl.rollout.engine_spec import EngineAddress
from mcore_rl.rollout.kv_admission import FreeKvMonitor, KvAdmission
from mcore_rl.rollout.migration import Migration, UnderWay, continue_request
from mcore_rl.rollout.paces import EnginePaces, Paces
from mcore_rl.rollout.request import EngineAffinity, Request, Sampling
from mcore_rl.rollout.slots import Slots
from mcore_rl.rollout.transport import (
    AbortedError,
    EngineTransport,
    OpenTransport,
    RolloutError,
    TransientError,
)
from mcore_rl.types import Prompt, Sample

_log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.25
_HOLD_POLL_S = 0.02


class EngineSet:
    """The engines of a client: who serves, how much each has to do, what moves between them."""

    def __init__(
        self,
        addresses: Sequence[EngineAddress],
        health: EngineHealth,
        own: Collection[str],
        migration_gap: int,
        home: int | None = None,
    ) -> None:
        """See RolloutClient; `migration_gap` as in Migration."""
        self.health = health
        self._loads = {address.url: EngineLoad(address) for address in addresses}
        self._first = list(addresses)
        self._first_own = [a for a in addresses if not own or a.url in own]
        self._home = home
        self.migration = Migration(migration_gap)
        self.paces = EnginePaces()
        self.drafts = DraftCounter()
        self._follow()

    def list_own(self) -> list[EngineLoad]:
        """Return the engines that the client asks first, without those that have left."""
        if self._num_changes != self.health.num_changes:
            self._follow()
        return self._own

    def _list_all(self) -> list[EngineLoad]:
        if self._num_changes != self.health.num_changes:
            self._follow()
        return self._engines

    def _follow(self) -> None:
        """Take in which engines have come and left."""
        self._num_changes = self.health.num_changes
        self._engines = self._find_loads(self.health.list_current(self._first))
        self._own = self._find_loads(self.health.list_current(self._first_own, self._home))

    def _find_loads(self, addresses: Sequence[EngineAddress]) -> list[EngineLoad]:
        """Return the load of each engine; make that of an engine which has just come."""
        for address in addresses:
            self._loads.setdefault(address.url, EngineLoad(address))
        return [self._loads[address.url] for address in addresses]

    def pick(
        self,
        request: Request,
        failed: Sequence[EngineLoad],
        admission: KvAdmission | None,
    ) -> EngineLoad:
        """Return the engine of the prompt's other requests, or the least loaded if it has too many.

        Engines of other nodes are asked if the client's own do not serve, or failed the request:
        a dead engine may not be known as such yet. Engines that already failed it come last, those
        with a full KV cache next to last. Raises RolloutError if no engine serves.
        """
        own = [engine for engine in self._list_serving(self.list_own()) if engine not in failed]
        serving = own or self._list_serving(self._list_all())
        if not serving:
            reasons = "; ".join(
                f"{e.address}: {self.health.why_out(e.address.url)}" for e in self._list_all()
            )
            raise RolloutError(f"no engine in rotation for {request}: {reasons}")
        candidates: Sequence[EngineLoad]
        candidates = [engine for engine in serving if engine not in failed] or serving
        if admission is not None:
            candidates = admission.choose_with_free_kv(candidates)
        least_loaded = min(candidates, key=lambda engine: engine.num_in_flight)
        affinity = request.affinity
        most_in_flight = least_loaded.num_in_flight + affinity.num_requests
        if affinity.engine in candidates and affinity.engine.num_in_flight < most_in_flight:
            return affinity.engine
        affinity.engine = least_loaded
        return least_loaded

    def balance(self, transport: EngineTransport) -> None:
        """Move a response to an engine with less to do, if the engines differ enough."""
        self.migration.maybe_move(self._list_serving(self.list_own()), transport)

    async def abort_all(self, transport: EngineTransport) -> None:
        """Have the engines end their requests; those that do not answer let them fail."""
        for engine in self._loads.values():
            if engine.num_in_flight:
                await transport.abort_all(engine.address)

    def _list_serving(self, engines: Sequence[EngineLoad]) -> list[EngineLoad]:
        return [engine for engine in engines if not self.health.why_out(engine.address.url)]


class RolloutSession:
    """Requests that share connections and one bound; they can be held back while weights change."""

    def __init__(
        self,
        engines: EngineSet,
        transport: EngineTransport,
        num_tries: int,
        max_in_flight: int,
        on_done: Callable[[], None],
        admission: KvAdmission | None = None,
    ) -> None:
        """A request fails for good after `num_tries` failures; else see RolloutClient.open."""
        self._engines = engines
        self.transport = transport
        self._num_tries = num_tries
        self._admission = admission
        self._on_done = on_done
        self._slots = Slots(max_in_flight)
        self._may_post = asyncio.Event()
        self._may_post.set()
        self._num_posted = 0
        self._num_holds = 0
        self.num_open = 0
        """Samples begun and not done."""
        self.num_waiting = 0
        """Samples that wait for others to be complete before they begin."""
        self.num_cut_off = 0
        """Responses that `hold` aborted half-way, to be sampled again."""

    @property
    def is_held(self) -> bool:
        return not self._may_post.is_set()

    def resize(self, max_in_flight: int) -> None:
        """Change the bound of the requests at once."""
        self._slots.resize(max_in_flight)

    async def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[Sample]:
        """Return `num_samples` samples of each prompt, grouped by prompt in the order of `prompts`.

        Lost connections, timeouts and aborted requests are retried, on another engine if there is
        one. Raises RolloutError for a request that fails config.retries + 1 times, and then cancels
        the others.
        """
        works = []
        for prompt in prompts:
            affinity = EngineAffinity(num_samples)
            adapter = prompt.adapter
            requests = (
                Request(prompt, index, affinity, adapter=adapter) for index in range(num_samples)
            )
            works += [self.sample(request, sampling) for request in requests]
        return await self.gather(works)

    async def sample(self, request: Request, sampling: Sampling) -> Sample:
        """Return one sample, or one turn of an episode; failures are retried on other engines.

        A request that `hold` cut off, or that failed before the hold, is sampled again from its
        beginning. A request that moves goes on elsewhere. Cuts and moves don't count as failures.
        Raises RolloutError after too many failures.
        """
        failed: list[EngineLoad] = []
        whole = request
        oldest = self._engines.health.version
        num_holds = self._num_holds
        while True:
            async with self._take_slot():
                if num_holds < self._num_holds:  # no response outlives one unless it was answered
                    request, num_holds = whole, self._num_holds
                if request.begun is whole.begun:
                    oldest = self._engines.health.version
                request = self._engines.migration.name_request(request)
                engine = self._engines.pick(request, failed, self._admission)
                under_way = UnderWay(engine, request.rid)
                try:
                    return await self._post(under_way, request, sampling, oldest)
                except TransientError as failure:
                    if self.is_held and isinstance(failure, AbortedError):
                        self.num_cut_off += 1
                        continue
                    if under_way.is_moved and isinstance(failure, AbortedError):
                        self._engines.migration.num_moved += 1
                        begun = failure.begun and _name_engine(failure.begun, engine.address.number)
                        request = continue_request(request, begun)
                        continue
                    failed.append(engine)
                    reason = str(failure)
                    request = _keep_drawn(request, whole, failure, engine, oldest)
            if len(failed) >= self._num_tries:
                raise RolloutError(
                    f"{engine.address}: {request} failed {len(failed)} times, last with {reason}"
                )
            _log.warning("%s: %s failed with %s; trying again", engine.address, request, reason)
            await asyncio.sleep(_FIRST_BACKOFF_S * 2 ** (len(failed) - 1))

    async def _post(
        self, under_way: UnderWay, request: Request, sampling: Sampling, oldest: int
    ) -> Sample:
        """Return the engine's sample, which weights `oldest` or newer ones must have drawn."""
        engine = under_way.engine
        if self._admission is not None:  # these tokens take their place in its KV cache at once
            begun_len = request.begun.response_len if request.begun else 0
            self._admission.take(engine, len(request.prompt.token_ids) + begun_len)
        with engine.request() as measure, self._engines.migration.note(under_way):
            sample = await self.transport.sample(engine.address, request, sampling)
            seconds, load = measure()
        _check_versions(sample, oldest)
        num_drawn = sample.response_len - (request.begun.response_len if request.begun else 0)
        self._engines.paces.note(engine.address.number, load, num_drawn, seconds)
        self._engines.drafts.add(sample.drafts)
        return _name_engine(sample, engine.address.number)

    async def gather(self, works: Sequence[Coroutine[Any, Any, Sample]]) -> list[Sample]:
        """Run coroutines that each make a sample; when one fails, cancel the others and raise."""
        tasks: list[asyncio.Task[Sample]] = []
        try:
            async with asyncio.TaskGroup() as task_group:
                for work in works:
                    self.num_open += 1
                    tasks.append(task_group.create_task(work))
                    tasks[-1].add_done_callback(self._note_done)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    def _note_done(self, task: asyncio.Task[Sample]) -> None:
        self.num_open -= 1
        self._on_done()

    @asynccontextmanager
    async def _take_slot(self) -> AsyncIterator[None]:
        """Wait until one more request may be posted; the block posts it.

        Afterwards a response may move, if nothing of the session waits.
        """
        with self._count_waiting():
            await self._slots.acquire()
        try:
            with self._count_waiting():
                await self._wait_until_admitted()
            self._num_posted += 1
            try:
                yield
            finally:
                self._num_posted -= 1
        finally:
            self._slots.release()
            if not self.is_held and not self.num_waiting:
                self._engines.balance(self.transport)

    @contextmanager
    def _count_waiting(self) -> Iterator[None]:
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1

    async def _wait_until_admitted(self) -> None:
        if self._admission is not None:
            await self._admission.wait(self._may_post)
        while self.is_held:
            await self._may_post.wait()

    async def hold(self, *, cut_off: bool) -> None:
        """Post nothing more, and return once no request is under way; `resume` ends it.

        `cut_off` aborts the requests under way instead of waiting for them. Each request has a
        deadline of its own, so this call ends. What an engine had drawn of a request before it
        failed is not gone on with afterwards.
        """
        self._may_post.clear()
        self._num_holds += 1
        while self._num_posted:
            # In each round: a request that was on its way has reached its engine by now.
            if cut_off:
                await self._engines.abort_all(self.transport)
            await asyncio.sleep(_HOLD_POLL_S)

    async def resume(self) -> None:
        self._may_post.set()


class RolloutClient:
    """Spreads requests over the engines: bounded, least loaded first, another engine on failure."""

    def __init__(
        self,
        engines: Sequence[EngineAddress],
        config: RolloutConfig,
        transport: OpenTransport,
        health: EngineHealth | None = None,
        own: Collection[str] = (),
        home: int | None = None,
    ) -> None:
        """Raises ValueError without an engine.

        `transport` is opened for each session. `health` says before each request which engines
        serve; None: all of them, always. Engines whose urls are in `own` are asked first, other
        engines only while no engine of `own` serves; empty: all. An engine that joins later counts
        as own if `home` is its collector; None: every such engine does.
        """
        if not engines:
            raise ValueError("RolloutClient needs at least one engine")
        health = health or EngineHealth([address.url for address in engines])
        self._engines = EngineSet(engines, health, own, config.migration_gap, home)
        self._config = config
        self._transport = transport
        self._home = home

    @property
    def max_in_flight(self) -> int:
        """Requests at once, all engines together."""
        return self._config.max_concurrency * len(self._engines.list_own())

    @property
    def num_moved(self) -> int:
        """Responses that moved to another engine so far."""
        return self._engines.migration.num_moved

    def take_paces(self) -> Paces:
        """Return the tokens and seconds of requests since the last call."""
        return self._engines.paces.take()

    def take_drafts(self) -> DraftCounts:
        """Return the verified drafts since the last call, by version of weights."""
        return self._engines.drafts.take()

    async def idle_seconds(self) -> float:
        """Return the seconds without a request so far, mean over the engines."""
        return fmean([engine.idle_s for engine in self._engines.list_own()] or [0.0])

    async def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[Sample]:
        """Call `RolloutSession.generate` in a session of its own."""
        async with self.open() as session:
            return await session.generate(prompts, num_samples, sampling)

    @asynccontextmanager
    async def open(
        self, max_in_flight: int = 0, on_done: Callable[[], None] = lambda: None
    ) -> AsyncIterator[RolloutSession]:
        """Open connections to the engines for the length of the block.

        `max_in_flight` bounds the requests at once, all engines together; 0: as many as the engines
        take. `on_done` is called when a sample is complete, failed or canceled.
        """
        num_tries = self._config.retries + 1
        most = max_in_flight or self.max_in_flight
        async with self._transport() as transport:
            if not self._config.min_free_kv:
                yield RolloutSession(self._engines, transport, num_tries, most, on_done)
                return
            addresses = [engine.address for engine in self._engines.list_own()]
            monitor = FreeKvMonitor(
                transport.free_kv, addresses, self._engines.health, home=self._home
            )
            admission = KvAdmission(
                *(monitor, self._engines.list_own),
                *(self._config.min_free_kv, self._config.kv_cache_len),
            )
            watching = asyncio.create_task(monitor.watch())
            try:
                yield RolloutSession(self._engines, transport, num_tries, most, on_done, admission)
            finally:
                watching.cancel()


def _keep_drawn(
    request: Request, whole: Request, failure: TransientError, engine: EngineLoad, oldest: int
) -> Request:
    """Return the request that goes on with what an engine drew before it failed, if it told.

    Otherwise, or if weights before `oldest` drew of it, the request that goes on with what others
    drew before, or the whole one where that was the failure.
    """
    if isinstance(failure, StaleWeightsError):
        return whole
    if failure.begun is None or _find_oldest(failure.begun, oldest) < oldest:
        return request
    _log.info("%s goes on with %d tokens", request, failure.begun.response_len)
    return continue_request(request, _name_engine(failure.begun, engine.address.number))


class StaleWeightsError(TransientError):
    """Weights that the engine does not hold any more drew tokens of a response."""


def _find_oldest(sample: Sample, default: int) -> int:
    return min((span.version for span in sample.versions), default=default)


def _name_engine(sample: Sample, engine: int) -> Sample:
    """Return the sample with the number of the engine that drew it, or the rest of it."""
    return replace(sample, engines=(*sample.engines, engine))


def _check_versions(sample: Sample, oldest: int) -> None:
    """Raise StaleWeightsError if weights drew tokens that the engine did not hold any more.

    It has started again since then, with those of its model's folder, unseen by its watch so far.
    """
    version = _find_oldest(sample, oldest)
    if version < oldest:
        raise StaleWeightsError(
            f"its tokens are drawn with weights {version} after a sync of {oldest}: the engine has"
            " started again"
        )
