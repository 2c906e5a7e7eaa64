"""Spreads prompts over the collectors of all nodes and returns stored samples.

A group goes to the collector with the fewest open samples per engine. Orders to a collector go out
one after the other, all that came up meanwhile together; one long poll per collector brings news.
So the controller's work grows with groups and nodes, not with tokens.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any
from weakref import finalize

from mcore_rl.rollout.collector import (
    CollectorCalls,
    GroupFacts,
    GroupFailure,
    GroupRequest,
    Orders,
)
from mcore_rl.rollout.engine_health import EngineHealth
from mcore_rl.rollout.least_loaded import LeastLoaded
from mcore_rl.rollout.length_history import LengthHistory
from mcore_rl.rollout.request import Sampling
from mcore_rl.rollout.transport import RolloutError
from mcore_rl.types import GroupLease, Prompt, StoredSample

NEWS_WAIT_S = 5.0
"""How long a collector without news keeps the controller's call open."""
GATHER_S = 0.01
"""Time between two answers of all collectors together, while more is to come."""


@dataclass
class _OpenGroup:
    session: "PoolSession"
    lease: GroupLease
    prompt: Prompt
    future: "asyncio.Future[list[StoredSample]]"


class _Outbox:
    """Orders to one collector that were not sent yet."""

    def __init__(self) -> None:
        self.sessions: dict[int, int] = {}
        self.begin: list[GroupRequest] = []
        self.cancel: list[int] = []
        self.end: list[int] = []
        self.dropped: deque[int] = deque()
        """Filled by finalizers, in any thread."""
        self.known_out: Mapping[str, str] | None = None
        self.may_send = asyncio.Event()
        self.lock = asyncio.Lock()

    def take(self, why_out: Mapping[str, str]) -> Orders:
        """Return what is to be sent now, and forget it."""
        dropped = [self.dropped.popleft() for _ in range(len(self.dropped))]
        news_of_engines = None if why_out == self.known_out else why_out
        orders = Orders(self.sessions, news_of_engines, self.begin, self.cancel, dropped, self.end)
        self.known_out = why_out
        self.sessions = {}
        self.begin = []
        self.cancel = []
        self.end = []
        return orders


class CollectorPool:
    """Spreads groups over the collectors, and gives out their samples as references."""

    def __init__(
        self,
        collectors: Sequence[CollectorCalls],
        engines_per_collector: Sequence[int],
        health: EngineHealth,
        max_concurrency: int,
    ) -> None:
        """`max_concurrency` is of each engine; `health` says which engines get requests."""
        self._collectors = collectors
        self._num_engines = engines_per_collector
        self._health = health
        self._max_concurrency = max_concurrency
        self._outboxes = [_Outbox() for _ in collectors]
        self._loads = LeastLoaded(len(collectors))
        """Open samples per engine of each collector."""
        self._gather_s = GATHER_S * len(collectors)
        self.history = LengthHistory()
        self._groups: dict[int, _OpenGroup] = {}
        self._sessions: dict[int, PoolSession] = {}
        self._next_group = 0
        self._next_session = 0
        self._running: list[asyncio.Task[None]] = []
        self._failure: BaseException | None = None

    @property
    def max_in_flight(self) -> int:
        """Requests at once, all engines together."""
        return self._max_concurrency * sum(self._num_engines)

    async def idle_seconds(self) -> float:
        """Return the seconds without a request so far, mean over the engines."""
        seconds = await asyncio.gather(*(c.idle_seconds() for c in self._collectors))
        weighted = zip(seconds, self._num_engines, strict=True)
        return fmean([s for s, num in weighted for _ in range(num)])

    async def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[StoredSample]:
        """Call `PoolSession.generate` in a session of its own."""
        async with self.open() as session:
            return await session.generate(prompts, num_samples, sampling)

    @asynccontextmanager
    async def open(
        self, max_in_flight: int = 0, on_done: Callable[[], None] = lambda: None
    ) -> "AsyncIterator[PoolSession]":
        """Open a session for the length of the block; see RolloutClient.open."""
        self._start()
        session = PoolSession(self, self._next_session, on_done)
        self._next_session += 1
        self._sessions[session.number] = session
        bound = max_in_flight or self.max_in_flight
        for outbox, num_engines in zip(self._outboxes, self._num_engines, strict=True):
            share = -(-bound * num_engines // sum(self._num_engines))
            outbox.sessions[session.number] = share
        try:
            yield session
        finally:
            del self._sessions[session.number]
            for outbox in self._outboxes:
                outbox.end.append(session.number)
                outbox.may_send.set()

    def begin(
        self, session: "PoolSession", prompt: Prompt, num_samples: int, sampling: Sampling
    ) -> "asyncio.Future[list[StoredSample]]":
        """Order the samples of a prompt; canceling the future cancels the order."""
        if self._failure is not None:
            raise self._failure
        store = self._loads.least()
        outbox = self._outboxes[store]
        number = self._next_group
        self._next_group += 1
        lease = GroupLease(store, number)
        finalize(lease, outbox.dropped.append, number).atexit = False
        future: asyncio.Future[list[StoredSample]] = asyncio.get_running_loop().create_future()
        self._groups[number] = _OpenGroup(session, lease, prompt, future)
        future.add_done_callback(lambda done: self._note_canceled(number, outbox, done))
        outbox.begin.append(GroupRequest(session.number, number, prompt, num_samples, sampling))
        self._loads.add(store, num_samples / self._num_engines[store])
        outbox.may_send.set()
        return future

    async def hold(self, session: "PoolSession", *, cut_off: bool) -> int:
        """Hold a session on all collectors; return the responses that were cut off so far."""
        await asyncio.gather(*map(self._flush, range(len(self._collectors))))
        holding = (c.hold(session.number, cut_off) for c in self._collectors)
        return sum(await asyncio.gather(*holding))

    async def resume(self, session: "PoolSession") -> None:
        await asyncio.gather(*(c.resume(session.number) for c in self._collectors))

    def _start(self) -> None:
        if self._failure is not None:
            raise self._failure
        if not self._running:
            for k in range(len(self._collectors)):
                self._running += [
                    asyncio.create_task(self._guarded(self._send(k))),
                    asyncio.create_task(self._guarded(self._listen(k))),
                ]

    async def _guarded(self, work: Coroutine[None, None, None]) -> None:
        """Run a task of the pool; its failure becomes that of every group that is waited for."""
        try:
            await work
        except Exception as error:
            self._failure = self._failure or error
            for group in list(self._groups.values()):
                if not group.future.done():
                    group.future.set_exception(self._failure)

    async def _send(self, k: int) -> None:
        outbox = self._outboxes[k]
        while True:
            await outbox.may_send.wait()
            await self._flush(k)

    async def _flush(self, k: int) -> None:
        outbox = self._outboxes[k]
        async with outbox.lock:
            outbox.may_send.clear()
            await self._collectors[k].obey(outbox.take(self._health.reasons))

    async def _listen(self, k: int) -> None:
        while True:
            news = await self._collectors[k].news(NEWS_WAIT_S, self._gather_s)
            for facts in news.finished:
                self._finish(facts)
            for failure in news.failed:
                self._fail(failure)
            self._loads.add(k, -sum(news.num_done.values()) / self._num_engines[k])
            for number, num_done in news.num_done.items():
                session = self._sessions.get(number)
                if session is not None:
                    session.note_done(num_done)
            if self._outboxes[k].dropped:
                self._outboxes[k].may_send.set()

    def _finish(self, facts: GroupFacts) -> None:
        group = self._groups.pop(facts.group, None)
        if group is not None and not group.future.done():
            self.history.note(group.prompt, facts.response_lens)
            group.future.set_result(_samples(group, facts))

    def _fail(self, failure: GroupFailure) -> None:
        group = self._groups.pop(failure.group, None)
        if group is not None and not group.future.done():
            kind = RolloutError if failure.may_retry else ValueError
            group.future.set_exception(kind(failure.message))

    def _note_canceled(self, number: int, outbox: _Outbox, future: "asyncio.Future[Any]") -> None:
        if future.cancelled():
            self._groups.pop(number, None)
            outbox.cancel.append(number)
            outbox.may_send.set()


class PoolSession:
    """Requests that share one bound; they can be held back while weights change.

    Does what rollout.client.RolloutSession does, on all collectors.
    """

    def __init__(self, pool: CollectorPool, number: int, on_done: Callable[[], None]) -> None:
        self.number = number
        self._pool = pool
        self._on_done = on_done
        self.is_held = False
        self.num_open = 0
        """Samples begun and not done."""
        self.num_cut_off = 0
        """Responses that `hold` aborted half-way, to be sampled again."""

    async def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[StoredSample]:
        """Return `num_samples` samples of each prompt, in the order of `prompts`.

        Prompts whose responses were long in earlier epochs begin first, so that none of them is
        left when the others are done.

        Raises RolloutError for a request that failed on all engines, and then cancels the others.
        """
        self.num_open += len(prompts) * num_samples
        groups = {
            i: self._pool.begin(self, prompts[i], num_samples, sampling)
            for i in self._pool.history.longest_first(prompts)
        }
        try:
            await asyncio.gather(*groups.values())
            return [sample for i in range(len(prompts)) for sample in groups[i].result()]
        finally:
            for group in groups.values():
                group.cancel()

    def note_done(self, num_samples: int) -> None:
        self.num_open -= num_samples
        self._on_done()

    async def hold(self, *, cut_off: bool) -> None:
        """Post nothing more, and return once no request is under way; `resume` ends it."""
        self.is_held = True
        self.num_cut_off = await self._pool.hold(self, cut_off=cut_off)

    async def resume(self) -> None:
        """Let requests be posted again; without a hold, do nothing."""
        if self.is_held:
            await self._pool.resume(self)
            self.is_held = False


def _samples(group: _OpenGroup, facts: GroupFacts) -> list[StoredSample]:
    rows = zip(facts.response_lens, facts.finish_reasons, facts.versions, strict=True)
    return [
        StoredSample(group.prompt, i, *row, facts.has_experts, group.lease)
        for i, row in enumerate(rows)
    ]
