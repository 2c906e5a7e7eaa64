"""An engine with continuous batching, as a fluid: all running requests decode at the same rate.

    arrives --> waiting --(KV cache and batch have room: prefill)--> running --> done
                   ^                                                   |
                   +------------ retracted: KV cache is full ----------+

One decode step of B requests with K tokens of context takes fixed_s(B) + per_context_s * K seconds.
K grows by B in each step, so the seconds of m steps are known in closed form, and nothing happens
between two events. Prefill comes before decode and stops it, and requests are let in and sent back
by the rules in kv_cache.py. Engines and collectors of a run are the real ones' code on top.
"""

import asyncio
import heapq
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from mcore_rl.batches.sample_store import SampleStore
from mcore_rl.config import RolloutConfig
from mcore_rl.rollout.client import RolloutClient
from mcore_rl.rollout.collector import (
    Collector,
    CollectorCommands,
    CollectorEvents,
    CollectorLostError,
)
from mcore_rl.rollout.engine_health import EngineHealth
from mcore_rl.rollout.engine_spec import EngineAddress
from mcore_rl.rollout.request import Request, Sampling
from mcore_rl.rollout.transport import AbortedError, TransientError
from mcore_rl.tools.simulate.kv_cache import EndedEarlyError, EngineRequest, EngineSpeed, KvCache
from mcore_rl.tools.simulate.virtual_time import Alarm, VirtualLoop, WorkClock, context_of
from mcore_rl.tools.simulate.workload import Workload
from mcore_rl.types import Sample, VersionSpan, WeightVersion

_SLACK = 1e-6


class SimulatedEngine:
    """Serves requests in virtual time."""

    def __init__(
        self,
        loop: VirtualLoop,
        url: str,
        speed: EngineSpeed,
        version: WeightVersion,
        clock: WorkClock | None = None,
    ) -> None:
        """`clock` counts the seconds in which it has a core; None: it always has."""
        self.url = url
        self.version = version
        self.busy_s = 0.0
        """Seconds of decode and prefill, as the loop counts them."""
        self.num_tokens = 0.0
        self.num_retracted = 0
        self.running_seconds = 0.0
        """Running requests, integrated over time."""
        self._loop = loop
        self._clock = clock or WorkClock(loop, {})
        self._speed = speed
        self._context = context_of("engines")
        self._waiting: deque[EngineRequest] = deque()
        self._running: OrderedDict[int, EngineRequest] = OrderedDict()
        self._by_end: list[tuple[float, int, EngineRequest]] = []
        self._num_admitted = 0
        self._steps = 0.0
        self._at_s, self._worked_s = loop.time(), self._clock.time()
        """The loop's and the clock's time at the last event."""
        self._is_working = False
        self._blocked_until_s = 0.0
        """When its prefill ends, on the clock."""
        self._context_len = 0.0
        """Tokens that the running requests attend to."""
        self._kv = KvCache(speed.kv_capacity, speed.share_prompts)
        self._is_paused = False
        self._is_gone = False
        self._timer: Alarm | None = None
        self._is_poked = False
        self.on_change: Callable[[float, int, int], None] = lambda now_s, running, waiting: None
        """Is told the time and the numbers of running and waiting requests."""

    async def sample(
        self,
        prompt: int,
        prompt_len: int,
        response_len: int,
        max_len: int,
        rid: str = "",
        begun_len: int = 0,
    ) -> tuple[VersionSpan, ...]:
        """Return once the response is complete, with the versions that sampled it.

        `begun_len` tokens were drawn elsewhere. Raises TransientError if the engine dies,
        AbortedError if its requests are ended, EndedEarlyError if this one is.
        """
        if self._is_gone:
            raise TransientError(f"{self.url}: connection refused")
        done = self._loop.create_future()
        lens = prompt_len, response_len, max_len
        request = EngineRequest(prompt, *lens, done, rid, num_generated=begun_len)
        self._waiting.append(request)
        self._poke()
        try:
            await done
        finally:
            self._forget(request)
        return request.spans(response_len)

    @property
    def free_kv(self) -> float:
        """The free share of the KV cache, as rollout.engine_room reads it off SGLang's loads."""
        self._advance()
        return self._kv.free_share(self._waiting, len(self._running))

    def abort_all(self) -> None:
        self._end_all(lambda: AbortedError("the engine aborted it: asked to"))

    def abort(self, rid: str) -> None:
        """End one request, whose error has what was drawn."""
        self._advance()
        known = (*self._running.values(), *self._waiting)
        request = next((r for r in known if r.rid == rid and not r.done.done()), None)
        if request is not None:
            num_drawn = self._num_generated(request) if request.number else request.num_generated
            self._forget(request)
            request.done.set_exception(EndedEarlyError(request.spans(round(num_drawn))))

    def fail(self) -> None:
        """Lose the server: its requests fail, and so do all later ones until `restart`."""
        self._end_all(lambda: TransientError(f"{self.url}: connection lost"))
        self._is_gone = True

    def restart(self) -> None:
        self._is_gone = False
        self._kv.flush()

    def pause(self) -> None:
        """Stop to decode; requests stay."""
        self._advance()
        self._is_paused = True
        self._arm()

    async def between_steps(self) -> None:
        """Return when what the engine computes has ended, as a request to its scheduler does."""
        if self._can_decode:
            self._advance()
            step_end_s = self._clock.time() + self._seconds_of(1.0)
            await self._clock.until(max(step_end_s, self._blocked_until_s))

    async def score(self, seconds: float) -> None:
        """Compute other sequences for so many seconds, in which no response goes on."""
        await self.between_steps()
        if not self._can_decode:
            await self._clock.work(seconds)
            return
        self._advance()
        self._block(seconds)
        self._arm()
        await self._clock.until(self._blocked_until_s)

    def resume(self, version: WeightVersion) -> None:
        """Go on with other weights: nothing stays cached, and running requests are prefilled
        again.
        """
        self._advance()
        self.version = version
        self._is_paused = False
        self._kv.flush()
        for request in self._running.values():
            request.edges.append((self._num_generated(request), version))
            self._prefill(request.prompt_len + self._num_generated(request))
        self._poke()

    @property
    def _can_decode(self) -> bool:
        return bool(self._running) and not self._is_paused

    def _num_generated(self, request: EngineRequest) -> int:
        return min(round(request.count_generated(self._steps)), request.response_len)

    def _poke(self) -> None:
        """Look at the queue once all requests of this moment have arrived."""
        if not self._is_poked:
            self._is_poked = True
            self._loop.call_soon(self._step, context=self._context)

    def _step(self) -> None:
        self._is_poked = False
        self._advance()
        while self._by_end and self._by_end[0][0] <= self._steps + _SLACK:
            _, number, request = heapq.heappop(self._by_end)
            if self._running.get(number) is request:
                self._leave(number)
                if not request.done.done():
                    request.done.set_result(None)
        if self._kv.free < 0 and len(self._running) > 1:
            self._retract()
        while self._waiting and self._admit():
            pass
        self._arm()
        self.on_change(self._at_s, len(self._running), len(self._waiting))

    def _advance(self) -> None:
        """Decode from the last event to now."""
        now_s = self._loop.time()
        worked_s = self._clock.time()
        num_running = len(self._running)
        seconds = worked_s - max(self._worked_s, min(self._blocked_until_s, worked_s))
        if num_running and not self._is_paused:
            self.busy_s += now_s - self._at_s
            self.running_seconds += num_running * (now_s - self._at_s)
            if seconds > 0:
                steps = self._speed.steps_in(seconds, num_running, self._context_len)
                self._steps += steps
                self._context_len += num_running * steps
                self._kv.grow(num_running * steps)
                self.num_tokens += num_running * steps
        self._at_s = now_s
        self._worked_s = worked_s

    def _seconds_of(self, steps: float) -> float:
        return self._speed.seconds_of(steps, len(self._running), self._context_len)

    def _admit(self) -> bool:
        """Let in a batch of requests for prefill; return whether there was room for one."""
        room = self._kv.begin_batch(self._running.values(), self._steps)
        num_before = len(self._running)
        while self._waiting and len(self._running) < self._speed.max_running:
            request = self._waiting[0]
            if request.done.done():  # its client gave up
                self._waiting.popleft()
                continue
            needed = self._kv.count_needed(request)
            if self._running and needed > room:
                break
            room -= needed
            self._waiting.popleft()
            self._enter(request)
        return len(self._running) > num_before

    def _enter(self, request: EngineRequest) -> None:
        request.began_at = self._steps - request.num_generated
        if not request.edges or request.edges[-1][1] != self.version:
            request.edges.append((round(request.num_generated), self.version))
        self._prefill(self._kv.enter(request))
        self._context_len += request.prompt_len + request.num_generated
        self._num_admitted += 1
        self._running[self._num_admitted] = request
        request.number = self._num_admitted
        end = request.began_at + request.response_len
        heapq.heappush(self._by_end, (end, self._num_admitted, request))

    def _prefill(self, num_tokens: int) -> None:
        self._block(self._speed.prefill_s(num_tokens))

    def _block(self, seconds: float) -> None:
        """Decode nothing for so many seconds more."""
        self._blocked_until_s = max(self._blocked_until_s, self._clock.time()) + seconds

    def _leave(self, number: int) -> EngineRequest:
        request = self._running.pop(number)
        request.number = 0
        request.num_generated = request.count_generated(self._steps)
        self._context_len -= request.prompt_len + request.num_generated
        self._kv.leave(request)
        return request

    def _retract(self) -> None:
        """Send the requests with the fewest tokens back: their KV cache is computed again."""
        by_len = sorted(self._running, key=lambda number: self._running[number].began_at)
        while len(by_len) > 1 and self._kv.free < len(by_len):
            self._waiting.appendleft(self._leave(by_len.pop()))
            self.num_retracted += 1
        self._kv.note_retraction(self._running.values(), self._steps)

    def _forget(self, request: EngineRequest) -> None:
        """End a request whose client has gone away, as the server does."""
        if request.number:
            self._advance()
            self._leave(request.number)
            self._poke()

    def _arm(self) -> None:
        """Set the timer to the next end of a response, or to when the KV cache is full."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._by_end and self._by_end[0][1] not in self._running:
            heapq.heappop(self._by_end)
        is_working = self._can_decode
        if is_working != self._is_working:
            self._is_working = is_working
            (self._clock.begin if is_working else self._clock.end)()
        if not is_working:
            return
        steps = max(self._by_end[0][0] - self._steps, 0.0)
        if len(self._running) > 1:
            steps = min(steps, max(self._kv.free, 0.0) / len(self._running) + _SLACK)
        begin_s = max(self._clock.time(), self._blocked_until_s)
        when_s = begin_s + self._seconds_of(steps)
        self._timer = self._clock.call_at(when_s, self._step, context=self._context)

    def _end_all(self, error: Callable[[], Exception]) -> None:
        self._advance()
        for number in list(self._running):
            self._waiting.append(self._leave(number))
        while self._waiting:
            request = self._waiting.popleft()
            if not request.done.done():
                request.done.set_exception(error())
        self._arm()


CALL_S = 1e-3
"""Seconds of a call to a collector, there and back."""


class SimulatedTransport:
    """Takes requests to simulated engines; implements rollout.transport.EngineTransport."""

    def __init__(self, engines: Mapping[str, SimulatedEngine], workload: Workload) -> None:
        self._engines = engines
        self._workload = workload

    @asynccontextmanager
    async def open(self) -> "AsyncIterator[SimulatedTransport]":
        yield self

    async def sample(self, engine: EngineAddress, request: Request, sampling: Sampling) -> Sample:
        prompt = request.prompt
        num_tokens, reason = self._workload.finish(
            prompt.index, request.sample_index, sampling.seed or 0, sampling.max_response_len
        )
        begun = request.begun.versions if request.begun else ()
        try:
            versions = await self._engines[engine.url].sample(
                prompt.index,
                len(prompt.token_ids),
                num_tokens,
                sampling.max_response_len,
                request.rid,
                begun[-1].stop if begun else 0,
            )
        except EndedEarlyError as ended:
            raise AbortedError(str(ended), _sample(request, begun + ended.versions, "")) from None
        return _sample(request, begun + versions, reason)

    async def abort(self, engine: EngineAddress, rid: str) -> None:
        self._engines[engine.url].abort(rid)

    async def abort_all(self, engine: EngineAddress) -> None:
        self._engines[engine.url].abort_all()

    async def free_kv(self, engine: EngineAddress) -> float | None:
        return self._engines[engine.url].free_kv


def _sample(request: Request, versions: tuple[VersionSpan, ...], reason: str) -> Sample:
    """Return a sample of which only the lengths count."""
    # A range has a length without holding numbers.
    tokens = cast(tuple[Any, ...], range(versions[-1].stop if versions else 0))
    return Sample(request.prompt, request.sample_index, tokens, tokens, reason, versions, "")


class SizesStore(SampleStore):
    """Keeps how many tokens each group has, instead of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self._num_tokens: dict[int, int] = {}
        self.most_tokens = 0

    def put(self, group: int, samples: Sequence[Sample]) -> None:
        prompt_len = len(samples[0].prompt.token_ids)
        self._num_tokens[group] = sum(prompt_len + sample.response_len for sample in samples)
        self.most_tokens = max(self.most_tokens, self.num_tokens)

    def drop(self, groups: Sequence[int]) -> None:
        for group in groups:
            self._num_tokens.pop(group, None)

    def clear(self) -> None:
        """Forget all groups: they are lost."""
        self._num_tokens.clear()

    @property
    def num_groups(self) -> int:
        return len(self._num_tokens)

    @property
    def num_tokens(self) -> int:
        return sum(self._num_tokens.values())


class SimulatedCollector:
    """A collector in a process of its own; implements rollout.collector.CollectorCalls."""

    def __init__(
        self,
        loop: VirtualLoop,
        rollout: RolloutConfig,
        addresses: Sequence[EngineAddress],
        own: Sequence[str],
        transport: SimulatedTransport,
    ) -> None:
        """`own` are the urls of the engines on the collector's node."""
        self.store = SizesStore()
        self._make = lambda: self._make_collector(rollout, addresses, own, transport)
        self._collector = self._make()
        self._loop = loop
        self._context = context_of("collectors")
        self._lost: asyncio.Future[None] = loop.create_future()
        """Raises CollectorLostError once the collector's machine is gone."""
        self._returns_after_s: float | None = None

    def _make_collector(
        self,
        rollout: RolloutConfig,
        addresses: Sequence[EngineAddress],
        own: Sequence[str],
        transport: SimulatedTransport,
    ) -> Collector:
        health = EngineHealth([address.url for address in addresses])
        client = RolloutClient(addresses, rollout, transport.open, health, own)
        return Collector(client, health, self.store)

    def lose(self, why: str, returns_after_s: float | None = None) -> None:
        """Lose the collector and its samples: all calls raise CollectorLostError.

        returns_after_s   seconds until it is on a spare machine; None: it is lost for good
        """
        if not self._lost.done():
            self._returns_after_s = returns_after_s
            self._lost.set_exception(CollectorLostError(why))
            self._lost.exception()  # seen: nobody may be calling
            self._loop.create_task(self._collector.close(), context=self._context.copy())

    async def submit(self, commands: CollectorCommands) -> None:
        await self._call(self._collector.submit, commands)

    async def poll_events(self, wait_s: float, gather_s: float) -> CollectorEvents:
        return await self._call(self._collector.poll_events, wait_s, gather_s)

    async def hold(self, session: int, cut_off: bool) -> int:
        return await self._call(self._collector.hold, session, cut_off)

    async def resume(self, session: int) -> None:
        await self._call(self._collector.resume, session)

    async def idle_seconds(self) -> float:
        return await self._call(self._collector.idle_seconds)

    async def restart(self, first_group: int) -> bool:
        if self._returns_after_s is None:
            return False
        await asyncio.sleep(self._returns_after_s)
        self.store.clear()
        self._collector = self._make()
        self._lost = self._loop.create_future()
        return True

    async def _call(self, work: Callable[..., Coroutine[Any, Any, Any]], *args: object) -> Any:
        if self._lost.done():
            return self._lost.result()
        task = self._loop.create_task(_call_later(work, *args), context=self._context.copy())
        await asyncio.wait([task, self._lost], return_when=asyncio.FIRST_COMPLETED)
        if self._lost.done():
            task.cancel()
            return self._lost.result()
        return await task


async def _call_later(work: Callable[..., Coroutine[Any, Any, Any]], *args: object) -> Any:
    await asyncio.sleep(CALL_S)
    return await work(*args)
