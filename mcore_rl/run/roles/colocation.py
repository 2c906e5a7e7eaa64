"""Moves models between GPU and host memory where trainer, critic and engines share GPUs.

phase        engines of the policy      trainer, critic               judge, reward model, teacher
rollout      weights and KV cache       -                             -
scoring      weights                    -                             all, while they score
training     -                          the working one: weights,     -
                                        or weights and optimizer
weight sync  weights                    the trainer's weights         -
saving       as before                  -                             -

An engine of the policy loses the weights that it releases; only a weight sync brings them back. One
that is lost is started again at the beginning of a weight sync, while the models are offloaded. All
other models offload to host memory: trainer and critic with cluster.offload, judges, reward models
and teachers always. Where the engines have GPUs of their own, rollout offloads no model.
Checkpoints and exports are written from host memory.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from mcore_rl.loops.roles import Critic, StoredTrainer
from mcore_rl.process.clock import now_s
from mcore_rl.process.http import open_session
from mcore_rl.process.server_keys import ServerKeys, admin_headers
from mcore_rl.types import (
    LogprobOptions,
    StepStats,
    StoredBatch,
    StoredColumn,
    StoredSample,
    TokenScores,
)
from mcore_rl.weight_sync.controller.engine_control import (
    GRAPHS,
    KV_CACHE,
    WEIGHTS,
    EngineControl,
)
from mcore_rl.weight_sync.controller.strategy import GRACE_S

S = TypeVar("S")
TRAINER = "trainer"
CRITIC = "critic"
WEIGHTS_ONLY = ("weights",)
ALL = ("weights", "training")
"""Parts of a model, see train/offload.py."""


LOSS_SHOWS_S = 15.0
"""How long the loss of an engine may take to show after a call of it failed: SGLang ends a server
some seconds after its scheduler died."""
LOSS_POLL_S = 0.5


class LostEngines(Protocol):
    """Engines that are started again when they are lost; see cluster.colocated_engines."""

    def list_living(self) -> list[str]: ...

    async def look(self) -> None: ...

    async def seat_lost(self) -> bool: ...

    async def start_lost(self) -> list[str]: ...


class EngineMemory:
    """The GPU memory of engines, all of it occupied at first; without urls, a no-op."""

    def __init__(
        self,
        urls: Sequence[str],
        timeout_s: float,
        keys: ServerKeys | None = None,
        *,
        with_graphs: bool = False,
        engines: LostEngines | None = None,
    ) -> None:
        """`timeout_s` bounds each wait for the engines, also the wait for their last requests.

        keys          the engines' keys; None if the engines have none
        with_graphs   the engines can release their CUDA graphs' memory, too, and do so wherever
                      they release the KV cache
        engines       the engines at `urls`, if lost ones are started again; None: the failure of a
                      call is raised
        """
        self._engines = engines
        self._unless_sampling = {KV_CACHE, GRAPHS} if with_graphs else {KV_CACHE}
        self._urls = urls
        self._timeout_s = timeout_s
        self._headers = admin_headers(keys)
        self._released: set[str] = set()

    @property
    def are_colocated(self) -> bool:
        return bool(self._urls)

    @property
    def lacks_weights(self) -> bool:
        """Whether engines gave up their weights, so that they serve after a weight sync only."""
        return self.are_colocated and WEIGHTS in self._released

    async def seat_lost(self) -> bool:
        """Return whether lost engines can be started now. Raises RankError; see LostEngines."""
        return self._engines is not None and await self._engines.seat_lost()

    async def start_lost(self) -> None:
        """Start the lost engines that can be; they then release what the others have released.

        The GPUs must have room for all of their memory. Raises RankError.
        """
        assert self._engines is not None, "engines were seated"
        urls = await self._engines.start_lost()
        if self._released:
            await self._on_all(lambda engine: self._give_up(engine, self._released), urls)

    async def for_training(self) -> None:
        """Release weights and KV cache. Raises EngineCallError, which names the engine."""
        await self._release({WEIGHTS, *self._unless_sampling} - self._released)

    async def for_scoring(self) -> None:
        """Release the KV cache and keep the weights."""
        await self._release(self._unless_sampling - self._released)

    async def for_sync(self) -> None:
        """Occupy the memory of the weights, which a weight sync writes."""
        await self._occupy({WEIGHTS} & self._released)

    async def for_rollout(self) -> None:
        """Occupy the KV cache; the engines must have their weights."""
        assert WEIGHTS not in self._released, (
            "engines that gave up their weights generate after a sync only"
        )
        await self._occupy(self._unless_sampling & self._released)

    async def restore(self) -> None:
        """Occupy all released memory; for engines that keep a copy of their weights on the host."""
        await self._occupy(set(self._released))

    async def _release(self, kinds: Collection[str]) -> None:
        if kinds:
            await self._on_all(lambda engine: self._give_up(engine, kinds))
            self._released.update(kinds)

    async def _give_up(self, engine: EngineControl, kinds: Collection[str]) -> None:
        await engine.wait_idle(self._timeout_s)
        await engine.release(kinds)

    async def _occupy(self, kinds: Collection[str]) -> None:
        if kinds:
            await self._on_all(lambda engine: engine.occupy(kinds))
            self._released -= set(kinds)

    async def _on_all(
        self,
        call: Callable[[EngineControl], Awaitable[None]],
        urls: Sequence[str] | None = None,
    ) -> None:
        """Make a call on the engines at `urls`, by default all that are not lost."""
        if urls is None:
            urls = self._urls if self._engines is None else self._engines.list_living()
        async with open_session(self._timeout_s + GRACE_S, self._headers) as http:
            calls = (call(EngineControl(http, url)) for url in urls)
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
        pairs = zip(urls, outcomes, strict=True)
        failed = {url: outcome for url, outcome in pairs if isinstance(outcome, BaseException)}
        if failed:
            await self._excuse_lost(failed)

    async def _excuse_lost(self, failed: Mapping[str, BaseException]) -> None:
        """Raise the first of the errors of engines that turn out not to be lost."""
        until_s = now_s() + LOSS_SHOWS_S
        while self._engines is not None:
            await self._engines.look()
            failed = {url: failed[url] for url in self._engines.list_living() if url in failed}
            if not failed or now_s() > until_s:
                break
            await asyncio.sleep(LOSS_POLL_S)
        for error in failed.values():
            raise error


class Model(Protocol):
    """The ranks of a trainer or critic."""

    async def hold(self, parts: Collection[str]) -> None:
        """Keep `parts` on the GPUs and offload the rest.

        parts   of "weights" and "training", which is gradients and optimizer state
        """
        ...


class SharedGpus:
    """Moves each phase's models onto the shared GPUs and offloads the others first."""

    def __init__(self, engines: EngineMemory, watched: Callable[[Awaitable[None]], None]) -> None:
        self._engines = engines
        self._watched = watched
        self._models: dict[str, Model] = {}
        self._colocated: dict[str, EngineMemory] = {}
        self._loaded_parts: dict[str, Collection[str]] = {}

    def add(self, role: str, model: Model) -> None:
        """Register a model that was just built, and offload it until its first phase."""
        self._models[role] = model
        self._loaded_parts[role] = ALL
        self._watched(self._load_only("", ()))

    def add_colocated(self, role: str, memory: EngineMemory) -> None:
        """Register a judge, reward model or teacher that was just started, and offload it."""
        self._colocated[role] = memory
        self._watched(memory.for_training())

    @contextmanager
    def hold_loaded(self, roles: Collection[str]) -> Iterator[None]:
        """Load the colocated judge, reward model and teacher among `roles` for the block.

        Afterwards the engines can generate. Does nothing if no such model is colocated.
        """
        colocated = [self._colocated[role] for role in roles if role in self._colocated]
        if not colocated:
            yield
            return
        self._watched(self._load_colocated(colocated))
        try:
            yield
        finally:
            self._watched(self._offload_colocated(colocated))
        self.prepare_rollout()

    def load(self, role: str, parts: Collection[str]) -> None:
        """Load these parts of one model and offload everything else."""
        if self._are_shared:
            self._watched(self._load(role, parts))

    def offload_models(self) -> None:
        """Offload trainer and critic, since checkpoints and exports need no GPU memory.

        The engines are left alone: engines that lost their weights would need a sync.
        """
        if self._models:
            self._watched(self._load_only("", ()))

    def prepare_rollout(self) -> None:
        """Call `for_rollout` from a thread without an event loop."""
        if self._are_shared:
            self._watched(self.for_rollout())

    def forget(self, roles: Collection[str]) -> None:
        """Note that the ranks of these models have ended, and with them all that was loaded."""
        self._loaded_parts |= dict.fromkeys(roles, ())

    def replace(self, role: str, restart: Callable[[], None]) -> None:
        """Call `restart`, which makes the ranks of a model anew, with room for them on the GPUs.

        Its earlier ranks are forgotten. The model is offloaded afterwards, if it ever is.
        """
        self.load("", ())
        restart()
        if role in self._models:
            self._loaded_parts[role] = ALL
            self._watched(self._load_only("", ()))

    @property
    def are_apart(self) -> bool:
        """Whether no model takes turns with others on its GPUs."""
        return not self._are_shared and not self._colocated

    @property
    def lacks_engine_weights(self) -> bool:
        """Whether engines gave up their weights, so that they serve after a weight sync only."""
        return self._engines.lacks_weights

    @property
    def _are_shared(self) -> bool:
        return self._engines.are_colocated or bool(self._models)

    async def for_sync(self) -> None:
        """Load the trainer's weights, and occupy the memory of the engines' weights.

        Before that, lost engines are started again. Raises RankError if one cannot be, and too few
        are left.
        """
        if await self._engines.seat_lost():
            await self._engines.for_scoring()
            await self._load_only("", ())
            await self._engines.start_lost()
        await self._load_only(TRAINER, WEIGHTS_ONLY)
        await self._engines.for_sync()

    async def for_rollout(self) -> None:
        """Let the engines, which have their weights, generate."""
        if self._engines.are_colocated:
            await self._load_only("", ())
        await self._engines.for_rollout()

    async def _load_colocated(self, colocated: Sequence[EngineMemory]) -> None:
        await self._engines.for_scoring()
        await self._load_only("", ())
        for engine_memory in colocated:
            await engine_memory.restore()

    async def _offload_colocated(self, colocated: Sequence[EngineMemory]) -> None:
        for engine_memory in colocated:
            await engine_memory.for_training()

    async def _load(self, role: str, parts: Collection[str]) -> None:
        await self._engines.for_training()
        await self._load_only(role, parts)

    async def _load_only(self, role: str, parts: Collection[str]) -> None:
        """Load `parts` of the model `role` and offload the other models; "" offloads all."""
        wanted = {name: parts if name == role else () for name in self._models}
        # The others offload first, so that there is room for this one.
        for name in sorted(wanted, key=lambda name: name == role):
            if set(wanted[name]) != set(self._loaded_parts[name]):
                await self._models[name].hold(wanted[name])
                self._loaded_parts[name] = wanted[name]


class SharingScorer(Generic[S]):
    """Has served models score samples; loads those that share GPUs meanwhile."""

    def __init__(
        self, score: Callable[[Sequence[StoredSample]], S], roles: Collection[str], gpus: SharedGpus
    ) -> None:
        self._score = score
        self._roles = roles
        self._gpus = gpus

    def __call__(self, samples: Sequence[StoredSample]) -> S:
        with self._gpus.hold_loaded(self._roles):
            return self._score(samples)


class SharingTrainer:
    """A trainer on shared GPUs: each call first loads the parts that it needs."""

    def __init__(self, trainer: StoredTrainer, gpus: SharedGpus) -> None:
        self._trainer = trainer
        self._gpus = gpus

    def compute_logprobs(
        self, batch: StoredBatch, options: LogprobOptions = LogprobOptions()
    ) -> TokenScores[StoredColumn]:
        self._gpus.load(TRAINER, WEIGHTS_ONLY)
        return self._trainer.compute_logprobs(batch, options)

    def train_step(self, batch: StoredBatch) -> StepStats:
        self._gpus.load(TRAINER, ALL)
        return self._trainer.train_step(batch)

    def save(self, step: int, state: Mapping[str, object]) -> None:
        self._gpus.offload_models()
        self._trainer.save(step, state)


class SharingCritic:
    """A critic on shared GPUs: each call first loads the parts that it needs."""

    def __init__(self, critic: Critic, gpus: SharedGpus) -> None:
        self._critic = critic
        self._gpus = gpus

    def compute_values(self, batch: StoredBatch) -> StoredColumn:
        self._gpus.load(CRITIC, WEIGHTS_ONLY)
        return self._critic.compute_values(batch)

    def train_step(self, batch: StoredBatch) -> StepStats:
        self._gpus.load(CRITIC, ALL)
        return self._critic.train_step(batch)

    def save(self, step: int) -> None:
        self._gpus.offload_models()
        self._critic.save(step)
