"""Spreads prompts over the collectors of all nodes and returns stored samples.

A group goes to the collector with the fewest open samples per engine; of the prompts that come
together, those whose responses were long in earlier epochs go first. Commands to a collector go out
one after the other, all that came up meanwhile together; one long poll per collector brings its
events. So the controller's work grows with groups and nodes, not with tokens.

A collector that is lost costs its samples: its open groups begin again on the others, or on its
successor. Whoever holds samples that were complete asks `is_lost`.
"""

import asyncio
import contextlib
import heapq
import logging
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from statistics import fmean
from typing import Any
from weakref import finalize

from mcore_rl.batches.group_facts import GroupFacts, refer_to_samples
from mcore_rl.rollout.collector import CollectorCalls, CollectorLostError, GroupFailure
from mcore_rl.rollout.collector_handle import CollectorHandle, PendingGroup
from mcore_rl.rollout.drafts import DraftCounter, DraftCounts
from mcore_rl.rollout.engine_health import EngineHealth
from mcore_rl.rollout.paces import EnginePaces, Paces
from mcore_rl.rollout.request import Sampling
from mcore_rl.rollout.transport import RolloutError
from mcore_rl.types import GroupLease, Prompt, StoredSample

_log = logging.getLogger(__name__)
POLL_WAIT_S = 5.0
"""How long a collector without events keeps the controller's call open."""
GATHER_S = 0.01
"""Time between two answers of all collectors together, while more is to come."""
KEPT_PROMPTS = 1_000_000


class LeastLoaded:
    """Loads of things numbered from 0; of equal ones the first is the least loaded."""

    def __init__(self, num_things: int) -> None:
        self._loads = [0.0] * num_things
        self._heap = [(0.0, k) for k in range(num_things)]
        """Has the load of each thing, and outdated ones that were not met yet."""

    def add(self, thing: int, load: float) -> None:
        """Raise a load; a negative number lowers it."""
        self._loads[thing] += load
        heapq.heappush(self._heap, (self._loads[thing], thing))

    def remove(self, thing: int) -> None:
        """Leave a thing out until it is put back."""
        self.add(thing, math.inf)

    def put_back(self, thing: int, load: float = 0.0) -> None:
        """Take in a thing that was removed, or give another load to one that was not."""
        self._loads[thing] = load
        heapq.heappush(self._heap, (load, thing))

    def least(self) -> int | None:
        """Return the least loaded thing; None if all are removed."""
        while self._heap[0][0] != self._loads[self._heap[0][1]]:
            heapq.heappop(self._heap)
        load, thing = self._heap[0]
        return None if load == math.inf else thing


class LengthHistory:
    """Mean response length of the prompts that were sampled last."""

    def __init__(self) -> None:
        self._lens: OrderedDict[tuple[str, int], float] = OrderedDict()
        self._sum = 0.0

    def note(self, prompt: Prompt, response_lens: Sequence[int]) -> None:
        """Keep the lengths of a group in place of those of the prompt's earlier groups."""
        key = (prompt.data_source, prompt.index)
        self._sum -= self._lens.pop(key, 0.0)
        self._lens[key] = fmean(response_lens)
        self._sum += self._lens[key]
        if len(self._lens) > KEPT_PROMPTS:
            self._sum -= self._lens.popitem(last=False)[1]

    def sort_longest_first(self, prompts: Sequence[Prompt]) -> list[int]:
        """Return the places of prompts, those with long responses first.

        A prompt without a history counts as a mean one; equal ones keep their order.
        """
        mean = self._sum / max(len(self._lens), 1)

        def expect_len(i: int) -> float:
            return self._lens.get((prompts[i].data_source, prompts[i].index), mean)

        return sorted(range(len(prompts)), key=lambda i: -expect_len(i))


class PoolSession:
    """Requests that share one bound; they can be held back while weights change.

    Implements what rollout.client.RolloutSession implements, on all collectors.
    """

    def __init__(
        self, pool: "CollectorPool", number: int, max_in_flight: int, on_done: Callable[[], None]
    ) -> None:
        """`max_in_flight` 0: as many as the engines take, which come and leave."""
        self.number = number
        self._max_in_flight = max_in_flight
        self._pool = pool
        self._on_done = on_done
        self.is_held = False
        self.num_open = 0
        """Samples begun and not done."""
        self.num_cut_off = 0
        """Responses that `hold` aborted half-way, to be sampled again."""

    @property
    def max_in_flight(self) -> int:
        """Requests at once, all collectors together."""
        return self._max_in_flight or self._pool.max_in_flight

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
            i: self._pool.submit(self, prompts[i], num_samples, sampling)
            for i in self._pool.history.sort_longest_first(prompts)
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


class CollectorPool:
    """Spreads groups over the collectors, and gives out their samples as references."""

    def __init__(
        self,
        collectors: Sequence[CollectorCalls],
        engines_of: Sequence[Sequence[str]],
        health: EngineHealth,
        max_concurrency: int,
    ) -> None:
        """`max_concurrency` is of each engine; `health` says which engines get requests, and which
        come and leave.

        engines_of   urls of the engines that each collector asks first
        """
        self._handles = [
            CollectorHandle(collector, len(engines))
            for collector, engines in zip(collectors, engines_of, strict=True)
        ]
        self._engines_of = [set(engines) for engines in engines_of]
        self._health = health
        health.on_change = self._follow_engines
        self._max_concurrency = max_concurrency
        self._loads = LeastLoaded(len(collectors))
        """Open samples per engine of each collector that is up."""
        self._gather_s = GATHER_S * len(collectors)
        self.history = LengthHistory()
        self._num_lost = 0
        self.num_done = 0
        """Samples that are drawn so far, the lost ones included."""
        self.num_tokens = 0
        """Response tokens of the groups that are drawn so far."""
        self.num_losses = 0
        """How often a collector was lost with what it kept."""
        self._paces = EnginePaces()
        self._drafts = DraftCounter()
        self._first_kept = [0] * len(collectors)
        """By collector, the smallest number of a group that is not lost."""
        self._waiting: list[PendingGroup] = []
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
        return sum(handle.num_engines for handle in self._handles)

    def is_lost(self, sample: StoredSample) -> bool:
        """Return whether the sample is gone with the collector that kept it."""
        return sample.lease.group < self._first_kept[sample.lease.store]

    def take_paces(self) -> Paces:
        """Return the tokens and seconds of requests since the last call, of all engines."""
        return self._paces.take()

    def take_drafts(self) -> DraftCounts:
        """Return the verified drafts since the last call, by version of weights."""
        return self._drafts.take()

    async def idle_seconds(self) -> float:
        """Return the seconds without a request so far, mean over the engines."""
        seconds = await asyncio.gather(*(handle.idle_seconds() for handle in self._handles))
        handles = zip(seconds, self._handles, strict=True)
        there = [(s, handle.num_engines) for s, handle in handles if s is not None]
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
        session = PoolSession(self, self._next_session, max_in_flight, on_done)
        self._next_session += 1
        self._sessions[session.number] = session
        for handle in self._handles:
            handle.open(session.number, self._share(session, handle))
        try:
            yield session
        finally:
            del self._sessions[session.number]
            for handle in self._handles:
                handle.end(session.number)

    def submit(
        self, session: PoolSession, prompt: Prompt, num_samples: int, sampling: Sampling
    ) -> "asyncio.Future[list[StoredSample]]":
        """Have the samples of a prompt drawn; canceling the future cancels the group."""
        if self._failure is not None:
            raise self._failure
        future: asyncio.Future[list[StoredSample]] = asyncio.get_running_loop().create_future()
        group = PendingGroup(session.number, prompt, num_samples, sampling, future)
        future.add_done_callback(partial(self._note_canceled, group))
        self._place(group)
        return future

    async def hold(self, session: PoolSession, *, cut_off: bool) -> int:
        """Hold a session on all collectors; return the responses that were cut off so far."""
        await asyncio.gather(*(self._flush(handle) for handle in self._handles))
        holding = (handle.hold(session.number, cut_off) for handle in self._handles)
        return sum(await asyncio.gather(*holding))

    async def resume(self, session: PoolSession) -> None:
        await asyncio.gather(*(handle.resume(session.number) for handle in self._handles))

    def _start(self) -> None:
        if self._failure is not None:
            raise self._failure
        if not self._running:
            for k in range(len(self._handles)):
                self._running.append(asyncio.create_task(self._guard(self._serve(k))))

    async def _guard(self, work: Coroutine[None, None, None]) -> None:
        """Run a task of the pool; its failure becomes that of every group that is waited for."""
        try:
            await work
        except Exception as error:
            self._failure = self._failure or error
            for group in self._waiting + [
                g for handle in self._handles for g in handle.groups.values()
            ]:
                if not group.future.done():
                    group.future.set_exception(self._failure)

    def _share(self, session: PoolSession, handle: CollectorHandle) -> int:
        """Return the session's bound of requests at one collector.

        One whose engines left has those of others sample what it has begun.
        """
        num_engines = max(handle.num_engines, 1)
        return -(-session.max_in_flight * num_engines // max(self._num_engines, 1))

    def _follow_engines(self) -> None:
        """Give each collector work by the engines that it has now."""
        rotation = self._health.rotation
        first = rotation.why_out.keys() - rotation.joined.keys()
        for k, handle in enumerate(self._handles):
            kept = len(self._engines_of[k] & first)
            joined = self._health.count_joined(k)
            handle.num_engines = 0 if handle.is_gone else kept + joined
        for k, handle in enumerate(self._handles):
            if handle.is_up:
                load = sum(handle.open_samples.values()) / max(handle.num_engines, 1)
                self._loads.put_back(k, load if handle.num_engines else math.inf)
                for session in self._sessions.values():
                    handle.open(session.number, self._share(session, handle))
                handle.may_send.set()
        self._place_waiting()

    def _place(self, group: PendingGroup) -> None:
        """Give a group to the least loaded collector; without one it waits for a successor."""
        store = self._loads.least()
        if store is None:
            self._waiting.append(group)
            return
        handle = self._handles[store]
        lease = self.adopt(store)
        self._loads.add(store, group.num_samples / handle.num_engines)
        handle.begin(group, lease)

    def adopt(self, store: int) -> GroupLease:
        """Return the place of a new group in a store, which forgets it with the last reference."""
        number = self._next_group
        self._next_group += 1
        lease = GroupLease(store, number)
        finalize(lease, self._handles[store].dropped.append, number).atexit = False
        return lease

    def _place_waiting(self) -> None:
        waiting = self._waiting
        self._waiting = [group for group in waiting if group.future.done()]
        for group in waiting:
            if not group.future.done():
                self._place(group)

    async def _serve(self, k: int) -> None:
        """Submit to a collector and poll its events, and do so with its successors."""
        handle = self._handles[k]
        while not handle.is_gone:
            try:
                if handle.is_up:
                    await _run_until_one_fails(self._send(handle), self._listen(k, handle))
                else:
                    await self._return(k, handle)
            except CollectorLostError as lost:
                self._lose(k, handle, lost)

    def _lose(self, k: int, handle: CollectorHandle, lost: CollectorLostError) -> None:
        """Begin the groups of a lost collector again, on those that are up or come back."""
        groups = [group for group in handle.groups.values() if not group.future.done()]
        _log.warning("%s; %d prompts that it was sampling begin again", lost, len(groups))
        for group in groups:
            if group.session in self._sessions:
                self._sessions[group.session].num_open += group.num_samples
            self._num_lost += group.num_samples
        for number, num_open in handle.open_samples.items():
            if number in self._sessions:
                self._sessions[number].note_done(num_open)
        handle.forget()
        self._first_kept[k] = self._next_group
        self.num_losses += 1
        self._loads.remove(k)
        self._waiting += groups
        self._place_waiting()

    async def _return(self, k: int, handle: CollectorHandle) -> None:
        """Take a lost collector's successor into service, with the sessions as they are now."""
        if not await handle.collector.restart(self._next_group):
            handle.leave()
            self._follow_engines()
            if all(other.is_gone for other in self._handles):
                raise RolloutError("no collector is left: all nodes with engines are gone")
            return
        handle.forget()
        for session in self._sessions.values():
            handle.open(session.number, self._share(session, handle))
        held: set[int] = set()
        while True:
            await handle.flush(self._health.rotation)
            changed = [s for s in self._sessions.values() if s.is_held != (s.number in held)]
            if not changed:
                break
            for session in changed:
                held ^= {session.number}
                if session.number in held:
                    await handle.collector.hold(session.number, False)
                else:
                    await handle.collector.resume(session.number)
        handle.is_up = True
        self._follow_engines()

    async def _send(self, handle: CollectorHandle) -> None:
        while True:
            await handle.may_send.wait()
            await handle.flush(self._health.rotation)

    async def _flush(self, handle: CollectorHandle) -> None:
        if handle.is_up:
            with contextlib.suppress(CollectorLostError):  # `_listen` meets the loss, too
                await handle.flush(self._health.rotation)

    async def _listen(self, k: int, handle: CollectorHandle) -> None:
        while True:
            events = await handle.collector.poll_events(POLL_WAIT_S, self._gather_s)
            for facts in events.finished:
                self._finish(handle, facts)
            self._paces.add(events.paces)
            self._drafts.add(events.drafts)
            for failure in events.failed:
                self._fail(handle, failure)
            self._loads.add(k, -sum(events.num_done.values()) / max(handle.num_engines, 1))
            self.num_done += sum(events.num_done.values())
            for number, num_done in events.num_done.items():
                handle.open_samples[number] -= num_done
                session = self._sessions.get(number)
                if session is not None:
                    session.note_done(num_done)
            if handle.dropped:
                handle.may_send.set()

    def _finish(self, handle: CollectorHandle, facts: GroupFacts) -> None:
        group = handle.groups.pop(facts.group, None)
        if group is not None and not group.future.done():
            self.history.note(group.prompt, facts.response_lens)
            self.num_tokens += sum(facts.response_lens)
            assert group.lease is not None, "a group is finished where it was placed"
            group.future.set_result(refer_to_samples(group.prompt, group.lease, facts))

    def _fail(self, handle: CollectorHandle, failure: GroupFailure) -> None:
        group = handle.groups.pop(failure.group, None)
        if group is not None and not group.future.done():
            kind = RolloutError if failure.may_retry else ValueError
            group.future.set_exception(kind(failure.message))

    def _note_canceled(self, group: PendingGroup, future: "asyncio.Future[Any]") -> None:
        if not future.cancelled():
            return
        if group in self._waiting:
            self._waiting.remove(group)
            if group.session in self._sessions:
                self._sessions[group.session].note_done(group.num_samples)
        elif group.lease is not None:
            self._handles[group.lease.store].cancel(group.lease.group)


async def _run_until_one_fails(*works: Coroutine[None, None, None]) -> None:
    """Run all at once; when one raises, cancel the others and raise its error."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
