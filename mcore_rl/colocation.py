"""GPUs that trainer ranks and engines share: whose memory is on them when.

rollout: an engine's weights and KV cache | training: nothing of an engine | weight sync: its weights

What an engine gave up is lost: its weights come back by a weight sync only.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import aiohttp

from mcore_rl.roles import Trainer
from mcore_rl.stream.engine_control import KV_CACHE, WEIGHTS, EngineControl
from mcore_rl.stream.update import GRACE_S
from mcore_rl.types import StepStats, TokenScores, TrainBatch


class EngineMemory:
    """The GPU memory of the engines at `urls`, which fill it at first. Without urls nothing happens."""

    def __init__(self, urls: Sequence[str], timeout_s: float) -> None:
        """`timeout_s` bounds each wait for the engines, the one for their last request included."""
        self._urls, self._timeout_s = urls, timeout_s
        self._released: set[str] = set()

    async def for_training(self) -> None:
        """All of it is free once this returns. EngineError names the engine that does not give it up."""
        wanted = {WEIGHTS, KV_CACHE} - self._released

        async def release(engine: EngineControl) -> None:
            await engine.wait_idle(self._timeout_s)
            await engine.release(wanted)

        if wanted:
            await self._on_all(release)
            self._released |= wanted

    async def for_sync(self) -> None:
        """There is room for the weights."""
        await self._occupy({WEIGHTS} & self._released)

    async def for_rollout(self) -> None:
        """The engines, which have their weights, can generate."""
        assert WEIGHTS not in self._released, "engines that gave up their weights generate after a sync only"
        await self._occupy({KV_CACHE} & self._released)

    async def _occupy(self, wanted: Collection[str]) -> None:
        if wanted:
            await self._on_all(lambda engine: engine.occupy(wanted))
            self._released.difference_update(wanted)

    async def _on_all(self, call: Callable[[EngineControl], Awaitable[None]]) -> None:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s + GRACE_S)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            await asyncio.gather(*(call(EngineControl(http, url)) for url in self._urls))


class ColocatedTrainer:
    """A trainer that works once the engines have given up their memory."""

    def __init__(
        self, trainer: Trainer, memory: EngineMemory, watched: Callable[[Awaitable[None]], None]
    ) -> None:
        self._trainer, self._memory, self._watched = trainer, memory, watched

    def compute_logprobs(
        self,
        batch: TrainBatch,
        *,
        reference: bool = False,
        temperature: float | None = None,
        sum_squares: bool = False,
    ) -> TokenScores:
        self._watched(self._memory.for_training())
        return self._trainer.compute_logprobs(
            batch, reference=reference, temperature=temperature, sum_squares=sum_squares
        )

    def train_step(self, batch: TrainBatch) -> StepStats:
        self._watched(self._memory.for_training())
        return self._trainer.train_step(batch)

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Takes no memory to speak of: engines keep theirs."""
        self._trainer.save(step, state)
