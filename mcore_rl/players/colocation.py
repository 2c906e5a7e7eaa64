"""GPUs that trainer ranks, critic ranks and engines share: whose memory is on them when.

rollout      an engine's weights and KV cache
scoring      all of the judge, reward model or teacher that scores; the engines' weights
training     nothing of an engine; of the model that works, what it needs: weights, or all
weight sync  the trainer's weights and an engine's

What an engine gave up is lost: its weights come back by a weight sync only. Models give up theirs to host
memory, with cluster.offload; judges, reward models and teachers always do.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from mcore_rl.process.http import open_session
from mcore_rl.roles import Critic, Trainer
from mcore_rl.stream.controller.engine_control import KV_CACHE, WEIGHTS, EngineControl
from mcore_rl.stream.controller.strategy import GRACE_S
from mcore_rl.types import LogprobOptions, Sample, StepStats, TokenScores, TrainBatch

S = TypeVar("S")
TRAINER, CRITIC = "trainer", "critic"
WEIGHTS_ONLY, ALL = ("weights",), ("weights", "training")
"""Parts of a model, see train/offload.py."""


class EngineMemory:
    """The GPU memory of the engines at `urls`, which fill it at first. Without urls nothing happens."""

    def __init__(self, urls: Sequence[str], timeout_s: float) -> None:
        """`timeout_s` bounds each wait for the engines, the one for their last request included."""
        self._urls, self._timeout_s = urls, timeout_s
        self._released: set[str] = set()

    async def for_training(self) -> None:
        """All of it is free once this returns. EngineCallError names the engine that does not give it up."""
        await self._give_up({WEIGHTS, KV_CACHE} - self._released)

    @property
    def are_colocated(self) -> bool:
        return bool(self._urls)

    async def for_saving(self) -> None:
        """The KV cache is free, the weights stay."""
        await self._give_up({KV_CACHE} - self._released)

    async def for_sync(self) -> None:
        """There is room for the weights."""
        await self._occupy({WEIGHTS} & self._released)

    async def for_rollout(self) -> None:
        """The engines, which have their weights, can generate."""
        assert WEIGHTS not in self._released, (
            "engines that gave up their weights generate after a sync only"
        )
        await self._occupy({KV_CACHE} & self._released)

    async def take_back(self) -> None:
        """All that was given up, for engines that keep their weights in host memory."""
        await self._occupy(self._released)

    async def _give_up(self, wanted: Collection[str]) -> None:
        async def release(engine: EngineControl) -> None:
            await engine.wait_idle(self._timeout_s)
            await engine.release(wanted)

        if wanted:
            await self._on_all(release)
            self._released.update(wanted)

    async def _occupy(self, wanted: Collection[str]) -> None:
        if wanted:
            await self._on_all(lambda engine: engine.occupy(wanted))
            self._released -= set(wanted)

    async def _on_all(self, call: Callable[[EngineControl], Awaitable[None]]) -> None:
        async with open_session(self._timeout_s + GRACE_S) as http:
            await asyncio.gather(*(call(EngineControl(http, url)) for url in self._urls))


class Model(Protocol):
    """Trainer or critic, as processes."""

    async def hold(self, parts: Collection[str]) -> None:
        """Have these parts of "weights" and "training" (gradients, optimizer) on the GPUs, and no others."""
        ...


class SharedGpus:
    """The turns of all that share GPUs."""

    def __init__(self, engines: EngineMemory, watched: Callable[[Awaitable[None]], None]) -> None:
        self._engines, self._watched = engines, watched
        self._models: dict[str, Model] = {}
        self._colocated: dict[str, EngineMemory] = {}
        self._held: dict[str, Collection[str]] = {}

    def add(self, role: str, model: Model) -> None:
        """A model, just built, that gives up its memory while others have the GPUs: from now on."""
        self._models[role], self._held[role] = model, ALL
        self._watched(self._hold_only("", ()))

    def add_colocated(self, role: str, memory: EngineMemory) -> None:
        """A judge, reward model or teacher, just started: from now on it has no memory but in its turns."""
        self._colocated[role] = memory
        self._watched(memory.for_training())

    @contextmanager
    def lent_to(self, roles: Collection[str]) -> Iterator[None]:
        """Room for those of `roles` that are colocated here; afterwards the engines can generate."""
        colocated = [self._colocated[role] for role in roles if role in self._colocated]
        if not colocated:
            yield
            return
        self._watched(self._lend(colocated))
        try:
            yield
        finally:
            self._watched(self._take_from(colocated))
        self.hand_to_engines()

    def take(self, role: str, parts: Collection[str]) -> None:
        """Room for these parts of one model, and nothing else there."""
        if self._are_shared:
            self._watched(self._take(role, parts))

    @contextmanager
    def beside_engines(self, role: str) -> Iterator[None]:
        """All of one model, beside the engines' weights, which a checkpoint must not cost them."""
        if self._are_shared:
            self._watched(self._take_beside_engines(role))
        yield
        self.hand_to_engines()

    def hand_to_engines(self) -> None:
        """`for_rollout`, for a caller without an event loop."""
        if self._are_shared:
            self._watched(self.for_rollout())

    @property
    def _are_shared(self) -> bool:
        return self._engines.are_colocated or bool(self._models)

    async def for_sync(self) -> None:
        """The trainer's weights and room for the engines'."""
        await self._hold_only(TRAINER, WEIGHTS_ONLY)
        await self._engines.for_sync()

    async def for_rollout(self) -> None:
        """The engines, which have their weights, can generate."""
        if self._engines.are_colocated:
            await self._hold_only("", ())
        await self._engines.for_rollout()

    async def _lend(self, colocated: Sequence[EngineMemory]) -> None:
        await self._engines.for_saving()
        await self._hold_only("", ())
        for engine_memory in colocated:
            await engine_memory.take_back()

    async def _take_from(self, colocated: Sequence[EngineMemory]) -> None:
        for engine_memory in colocated:
            await engine_memory.for_training()

    async def _take(self, role: str, parts: Collection[str]) -> None:
        await self._engines.for_training()
        await self._hold_only(role, parts)

    async def _take_beside_engines(self, role: str) -> None:
        await self._engines.for_saving()
        await self._hold_only(role, ALL)

    async def _hold_only(self, role: str, parts: Collection[str]) -> None:
        wanted = {name: parts if name == role else () for name in self._models}
        for name in sorted(wanted, key=lambda name: name == role):  # first those that give up
            if set(wanted[name]) != set(self._held[name]):
                await self._models[name].hold(wanted[name])
                self._held[name] = wanted[name]


class SharingScorer(Generic[S]):
    """What asks served models about samples, once there is room for those that share GPUs."""

    def __init__(
        self, ask: Callable[[Sequence[Sample]], S], roles: Collection[str], gpus: SharedGpus
    ) -> None:
        self._ask, self._roles, self._gpus = ask, roles, gpus

    def __call__(self, samples: Sequence[Sample]) -> S:
        with self._gpus.lent_to(self._roles):
            return self._ask(samples)


class SharingTrainer:
    """A trainer that works once there is room for it."""

    def __init__(self, trainer: Trainer, gpus: SharedGpus) -> None:
        self._trainer, self._gpus = trainer, gpus

    def compute_logprobs(
        self, batch: TrainBatch, options: LogprobOptions = LogprobOptions()
    ) -> TokenScores:
        self._gpus.take(TRAINER, WEIGHTS_ONLY)
        return self._trainer.compute_logprobs(batch, options)

    def train_step(self, batch: TrainBatch) -> StepStats:
        self._gpus.take(TRAINER, ALL)
        return self._trainer.train_step(batch)

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        with self._gpus.beside_engines(TRAINER):
            self._trainer.save(step, state)


class SharingCritic:
    """A critic that works once there is room for it."""

    def __init__(self, critic: Critic, gpus: SharedGpus) -> None:
        self._critic, self._gpus = critic, gpus

    def compute_values(self, batch: TrainBatch) -> Tensor:
        self._gpus.take(CRITIC, WEIGHTS_ONLY)
        return self._critic.compute_values(batch)

    def train_step(self, batch: TrainBatch) -> StepStats:
        self._gpus.take(CRITIC, ALL)
        return self._critic.train_step(batch)

    def save(self, step: int) -> None:
        with self._gpus.beside_engines(CRITIC):
            self._critic.save(step)
