"""Spreads prompts over the collectors of all nodes and returns stored samples.

A group goes to the collector with the fewest open samples per engine. Orders to a collector go out
one after the other, all that came up meanwhile together; one long poll per collector brings news.
So the controller's work grows with groups and nodes, not with tokens.

A collector that is lost costs its samples: its open groups begin again on the others, or on its
successor. Whoever holds samples that were complete asks `is_lost`.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from statistics import fmean
from typing import Any
from weakref import finalize

from mcore_rl.rollout.collector import CollectorCalls, CollectorLost, GroupFacts, GroupFailure
from mcore_rl.rollout.collector_line import CollectorLine, OrderedGroup, samples_of
from mcore_rl.rollout.engine_health import EngineHealth
from mcore_rl.rollout.least_loaded import LeastLoaded
from mcore_rl.rollout.length_history import LengthHistory
from mcore_rl.rollout.pool_session import PoolSession
from mcore_rl.rollout.request import Sampling
from mcore_rl.rollout.transport import RolloutError
from mcore_rl.types import GroupLease, Prompt, StoredSample

_log = logging.getLogger(__name__)
NEWS_WAIT_S = 5.0
"""How long a collector without news keeps the controller's call open."""
GATHER_S = 0.01
"""Time between two answers of all collectors together, while more is to come."""


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
        self._lines = [
            CollectorLine(collector, num_engines)
            for collector, num_engines in zip(collectors, engines_per_collector, strict=True)
        ]
        self._health = health
        self._max_concurrency = max_concurrency
        self._loads = LeastLoaded(len(collectors))
        """Open samples per engine of each collector that is up."""
        self._gather_s = GATHER_S * len(collectors)
        self.history = LengthHistory()
        self._num_lost = 0
        self.num_losses = 0
        """How often a collector was lost with what it kept."""
        self._first_kept = [0] * len(collectors)
        """By collector, the smallest number of a group that is not lost."""
        self._waiting: list[OrderedGroup] = []
        """Groups that begin once a collector is up."""
        self._sessions: dict[int, PoolSession] = {}
        self._next_group = 0
        self._next_session = 0
        self._running: list[asyncio.Task[None]] = []
        self._failure: BaseException | None = None

    @property
    def max_in_flight(self) -> int:
        """Requests at once, all engines together."""
        return self._max_concurrency * self._num_engines

    @property
    def num_lost(self) -> int:
        """Samples that were begun and lost with a collector before they were there."""
        return self._num_lost

    @property
    def _num_engines(self) -> int:
        return sum(line.num_engines for line in self._lines)

    def is_lost(self, sample: StoredSample) -> bool:
        """Return whether the sample is gone with the collector that kept it."""
        return sample.lease.group < self._first_kept[sample.lease.store]

    async def idle_seconds(self) -> float:
        """Return the seconds without a request so far, mean over the engines."""
        seconds = await asyncio.gather(*(line.idle_seconds() for line in self._lines))
        lines = zip(seconds, self._lines, strict=True)
        there = [(s, line.num_engines) for s, line in lines if s is not None]
        return fmean([s for s, num in there for _ in range(num)] or [0.0])

    async def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[StoredSample]:
        """Call `PoolSession.generate` in a session of its own."""
        async with self.open() as session:
            return await session.generate(prompts, num_samples, sampling)

    @asynccontextmanager
    async def open(
        self, max_in_flight: int = 0, on_done: Callable[[], None] = lambda: None
    ) -> AsyncIterator[PoolSession]:
        """Open a session for the length of the block; see RolloutClient.open."""
        self._start()
        session = PoolSession(
            self, self._next_session, max_in_flight or self.max_in_flight, on_done
        )
        self._next_session += 1
        self._sessions[session.number] = session
        for line in self._lines:
            line.open(session.number, self._share(session, line))
        try:
            yield session
        finally:
            del self._sessions[session.number]
            for line in self._lines:
                line.end(session.number)

    def begin(
        self, session: PoolSession, prompt: Prompt, num_samples: int, sampling: Sampling
    ) -> "asyncio.Future[list[StoredSample]]":
        """Order the samples of a prompt; canceling the future cancels the order."""
        if self._failure is not None:
            raise self._failure
        future: asyncio.Future[list[StoredSample]] = asyncio.get_running_loop().create_future()
        group = OrderedGroup(session, prompt, num_samples, sampling, future)
        future.add_done_callback(partial(self._note_canceled, group))
        self._place(group)
        return future

    async def hold(self, session: PoolSession, *, cut_off: bool) -> int:
        """Hold a session on all collectors; return the responses that were cut off so far."""
        await asyncio.gather(*(self._flush(line) for line in self._lines))
        holding = (line.hold(session.number, cut_off) for line in self._lines)
        return sum(await asyncio.gather(*holding))

    async def resume(self, session: PoolSession) -> None:
        await asyncio.gather(*(line.resume(session.number) for line in self._lines))

    def _start(self) -> None:
        if self._failure is not None:
            raise self._failure
        if not self._running:
            for k in range(len(self._lines)):
                self._running.append(asyncio.create_task(self._guarded(self._serve(k))))

    async def _guarded(self, work: Coroutine[None, None, None]) -> None:
        """Run a task of the pool; its failure becomes that of every group that is waited for."""
        try:
            await work
        except Exception as error:
            self._failure = self._failure or error
            for group in self._waiting + [g for line in self._lines for g in line.groups.values()]:
                if not group.future.done():
                    group.future.set_exception(self._failure)

    def _share(self, session: PoolSession, line: CollectorLine) -> int:
        """Return the session's bound of requests at one collector."""
        return -(-session.max_in_flight * line.num_engines // self._num_engines)

    def _place(self, group: OrderedGroup) -> None:
        """Order a group from the least loaded collector; without one it waits for a successor."""
        store = self._loads.least()
        if store is None:
            self._waiting.append(group)
            return
        line = self._lines[store]
        number = self._next_group
        self._next_group += 1
        lease = GroupLease(store, number)
        finalize(lease, line.dropped.append, number).atexit = False
        self._loads.add(store, group.num_samples / line.num_engines)
        line.begin(group, lease)

    def _place_waiting(self) -> None:
        waiting = self._waiting
        self._waiting = []
        for group in waiting:
            if not group.future.done():
                self._place(group)

    async def _serve(self, k: int) -> None:
        """Send orders to a collector and take its news, and do so with its successors."""
        line = self._lines[k]
        while not line.is_gone:
            try:
                if line.is_up:
                    await _until_one_fails(self._send(line), self._listen(k, line))
                else:
                    await self._return(k, line)
            except CollectorLost as lost:
                self._lose(k, line, lost)

    def _lose(self, k: int, line: CollectorLine, lost: CollectorLost) -> None:
        """Begin the groups of a lost collector again, on those that are up or come back."""
        groups = [group for group in line.groups.values() if not group.future.done()]
        _log.warning("%s; %d prompts that it was sampling begin again", lost, len(groups))
        for group in groups:
            group.session.num_open += group.num_samples
            self._num_lost += group.num_samples
        for number, num_open in line.open_samples.items():
            if number in self._sessions:
                self._sessions[number].note_done(num_open)
        line.forget()
        self._first_kept[k] = self._next_group
        self.num_losses += 1
        self._loads.remove(k)
        self._waiting += groups
        self._place_waiting()

    async def _return(self, k: int, line: CollectorLine) -> None:
        """Take a lost collector's successor into service, with the sessions as they are now."""
        if not await line.collector.restart(self._next_group):
            line.leave()
            if all(other.is_gone for other in self._lines):
                raise RolloutError("no collector is left: all nodes with engines are gone")
            return
        line.forget()
        for session in self._sessions.values():
            line.open(session.number, self._share(session, line))
        held: set[int] = set()
        while True:
            await line.flush(self._health.rotation)
            changed = [s for s in self._sessions.values() if s.is_held != (s.number in held)]
            if not changed:
                break
            for session in changed:
                held ^= {session.number}
                if session.number in held:
                    await line.collector.hold(session.number, False)
                else:
                    await line.collector.resume(session.number)
        line.is_up = True
        self._loads.put_back(k)
        self._place_waiting()

    async def _send(self, line: CollectorLine) -> None:
        while True:
            await line.may_send.wait()
            await line.flush(self._health.rotation)

    async def _flush(self, line: CollectorLine) -> None:
        if line.is_up:
            with contextlib.suppress(CollectorLost):  # `_listen` meets the loss, too
                await line.flush(self._health.rotation)

    async def _listen(self, k: int, line: CollectorLine) -> None:
        while True:
            news = await line.collector.news(NEWS_WAIT_S, self._gather_s)
            for facts in news.finished:
                self._finish(line, facts)
            for failure in news.failed:
                self._fail(line, failure)
            self._loads.add(k, -sum(news.num_done.values()) / line.num_engines)
            for number, num_done in news.num_done.items():
                line.open_samples[number] -= num_done
                session = self._sessions.get(number)
                if session is not None:
                    session.note_done(num_done)
            if line.dropped:
                line.may_send.set()

    def _finish(self, line: CollectorLine, facts: GroupFacts) -> None:
        group = line.groups.pop(facts.group, None)
        if group is not None and not group.future.done():
            self.history.note(group.prompt, facts.response_lens)
            group.future.set_result(samples_of(group, facts))

    def _fail(self, line: CollectorLine, failure: GroupFailure) -> None:
        group = line.groups.pop(failure.group, None)
        if group is not None and not group.future.done():
            kind = RolloutError if failure.may_retry else ValueError
            group.future.set_exception(kind(failure.message))

    def _note_canceled(self, group: OrderedGroup, future: "asyncio.Future[Any]") -> None:
        if future.cancelled() and group.lease is not None:
            self._lines[group.lease.store].cancel(group.lease.group)


async def _until_one_fails(*works: Coroutine[None, None, None]) -> None:
    """Run all at once; when one raises, cancel the others and raise its error."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
