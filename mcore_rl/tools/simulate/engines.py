"""Stands for engines and collectors: the real ones' code, on engines that only pass time."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from mcore_rl.batches.sample_store import SampleStore
from mcore_rl.config import Config
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
from mcore_rl.rollout.transport import AbortedError
from mcore_rl.tools.simulate.engine import SimulatedEngine
from mcore_rl.tools.simulate.kv_cache import EndedEarlyError
from mcore_rl.tools.simulate.virtual_loop import VirtualLoop, context_of
from mcore_rl.tools.simulate.workload import Workload
from mcore_rl.types import Sample, VersionSpan

CALL_S = 1e-3
"""Seconds of a call to a collector, there and back."""


class SimulatedTransport:
    """Takes requests to simulated engines; plays rollout.transport.EngineTransport."""

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

    @property
    def num_groups(self) -> int:
        return len(self._num_tokens)

    @property
    def num_tokens(self) -> int:
        return sum(self._num_tokens.values())


class SimulatedCollector:
    """A collector in a process of its own; plays rollout.collector.CollectorCalls."""

    def __init__(
        self,
        loop: VirtualLoop,
        config: Config,
        addresses: Sequence[EngineAddress],
        own: Sequence[str],
        transport: SimulatedTransport,
    ) -> None:
        """`own` are the urls of the engines on the collector's node."""
        health = EngineHealth([address.url for address in addresses])
        client = RolloutClient(addresses, config.rollout, transport.open, health, own)
        self.store = SizesStore()
        self._collector = Collector(client, health, self.store)
        self._loop = loop
        self._context = context_of("collectors")
        self._lost: asyncio.Future[None] = loop.create_future()
        """Raises CollectorLostError once the collector's machine is gone."""

    def lose(self, why: str) -> None:
        """Lose the collector and its samples for good: all calls raise CollectorLostError."""
        if not self._lost.done():
            self._lost.set_exception(CollectorLostError(why))
            self._lost.exception()  # seen: nobody may be calling
            self._loop.create_task(self._collector.close(), context=self._context.copy())

    async def submit(self, commands: CollectorCommands) -> None:
        await self._call(self._collector.submit(commands))

    async def poll_events(self, wait_s: float, gather_s: float) -> CollectorEvents:
        return await self._call(self._collector.poll_events(wait_s, gather_s))

    async def hold(self, session: int, cut_off: bool) -> int:
        return await self._call(self._collector.hold(session, cut_off))

    async def resume(self, session: int) -> None:
        await self._call(self._collector.resume(session))

    async def idle_seconds(self) -> float:
        return await self._call(self._collector.idle_seconds())

    async def restart(self, first_group: int) -> bool:
        return False

    async def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self._lost.done():
            work.close()
            return self._lost.result()
        task = self._loop.create_task(_after(CALL_S, work), context=self._context.copy())
        await asyncio.wait([task, self._lost], return_when=asyncio.FIRST_COMPLETED)
        if self._lost.done():
            task.cancel()
            return self._lost.result()
        return await task


async def _after(seconds: float, work: Coroutine[Any, Any, Any]) -> Any:
    await asyncio.sleep(seconds)
    return await work
