"""Sends prompts to the engines and returns samples (token ids, log-probs, weight versions)."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from statistics import fmean

from mcore_rl.config import RolloutConfig
from mcore_rl.rollout.engine_health import EngineHealth, EngineLoad
from mcore_rl.rollout.engine_room import EngineRoom, KvAdmission
from mcore_rl.rollout.engine_spec import EngineAddress
from mcore_rl.rollout.migration import Migration, UnderWay, moved
from mcore_rl.rollout.request import Request, Sampling
from mcore_rl.rollout.session import RolloutSession
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


class RolloutClient:
    """Spreads requests over the engines: bounded, least loaded first, another engine on failure."""

    num_losses = 0
    """Samples are never lost with a collector, as this process keeps them."""

    def __init__(
        self,
        engines: Sequence[EngineAddress],
        config: RolloutConfig,
        transport: OpenTransport,
        health: EngineHealth | None = None,
        own: Collection[str] = (),
    ) -> None:
        """Raises ValueError without an engine.

        `transport` is opened for each session. `health` says before each request which engines
        serve; None: all of them, always. Engines whose urls are in `own` come first, the others
        only where none of these serves; empty: all.
        """
        if not engines:
            raise ValueError("RolloutClient needs at least one engine")
        self._health = health or EngineHealth([address.url for address in engines])
        self._engines = [EngineLoad(address) for address in engines]
        self._own = [e for e in self._engines if not own or e.address.url in own]
        self._config = config
        self._transport = transport
        self._migration = Migration(config.migration_gap)

    @property
    def max_in_flight(self) -> int:
        """Requests at once, all engines together."""
        return self._config.max_concurrency * len(self._own)

    @property
    def num_lost(self) -> int:
        """Samples that were lost with their store: none, as this process keeps them."""
        return 0

    @property
    def num_moved(self) -> int:
        """Responses that moved to another engine so far."""
        return self._migration.num_moved

    def is_lost(self, sample: Sample) -> bool:
        return False

    async def idle_seconds(self) -> float:
        """Return the seconds without a request so far, mean over the engines."""
        return fmean(engine.idle_s for engine in self._own)

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
        most = max_in_flight or self.max_in_flight
        async with self._transport() as transport:
            if not self._config.min_free_kv:
                yield RolloutSession(self, transport, most, on_done)
                return
            addresses = [engine.address for engine in self._own]
            room = EngineRoom(transport.free_kv, addresses, self._health)
            watching = asyncio.create_task(room.watch())
            try:
                yield RolloutSession(self, transport, most, on_done, self._admission(room))
            finally:
                watching.cancel()

    def _admission(self, room: EngineRoom) -> KvAdmission:
        return KvAdmission(room, self._own, self._config.min_free_kv, self._config.kv_cache_len)

    async def sample_one(
        self, session: RolloutSession, request: Request, sampling: Sampling
    ) -> Sample:
        """Return one sample, retrying failures on other engines.

        Requests that the session aborted are sampled again, those that move go on elsewhere; both
        don't count as retries. Raises RolloutError after config.retries + 1 failures.
        """
        failed: list[EngineLoad] = []
        whole = request
        oldest = self._health.version
        while True:
            async with session.slot():
                if request is whole:
                    oldest = self._health.version
                request = self._migration.named(request)
                engine = self._pick(request, failed, session.admission)
                session.note_picked(engine, request)
                under_way = UnderWay(engine, request.rid)
                try:
                    with engine.request(), self._migration.note(under_way):
                        sample = await session.transport.sample(engine.address, request, sampling)
                    _check_versions(sample, oldest)
                    return sample
                except TransientError as failure:
                    if session.is_held and isinstance(failure, AbortedError):
                        session.num_cut_off += 1
                        request = whole
                        continue
                    if under_way.is_moved and isinstance(failure, AbortedError):
                        self._migration.num_moved += 1
                        request = moved(request, failure.begun)
                        continue
                    failed.append(engine)
                    reason = str(failure)
            if len(failed) > self._config.retries:
                raise RolloutError(
                    f"{engine.address}: {request} failed {len(failed)} times, last with {reason}"
                )
            _log.warning("%s: %s failed with %s; trying again", engine.address, request, reason)
            await asyncio.sleep(_FIRST_BACKOFF_S * 2 ** (len(failed) - 1))

    def balance(self, session: RolloutSession) -> None:
        """Move a response to an engine with less to do, if nothing of the session waits."""
        if self._migration.is_on and not session.is_held and not session.num_waiting:
            self._migration.maybe_move(self._serving(self._own), session.transport)

    async def abort_all(self, transport: EngineTransport) -> None:
        """Have the engines end their requests; those that do not answer let them fail."""
        for engine in self._engines:
            if engine.num_in_flight:
                await transport.abort_all(engine.address)

    def _pick(
        self,
        request: Request,
        failed: Sequence[EngineLoad],
        admission: KvAdmission | None,
    ) -> EngineLoad:
        """Return the engine of the prompt's other requests, or the least loaded if it has too many.

        Engines that already failed the request come last, those without room next to last. Raises
        RolloutError if no engine serves.
        """
        serving = self._serving(self._own) or self._serving(self._engines)
        if not serving:
            reasons = "; ".join(
                f"{e.address}: {self._health.why_out(e.address.url)}" for e in self._engines
            )
            raise RolloutError(f"no engine in rotation for {request}: {reasons}")
        candidates: Sequence[EngineLoad]
        candidates = [engine for engine in serving if engine not in failed] or serving
        if admission is not None:
            candidates = admission.with_room(candidates)
        least_loaded = min(candidates, key=lambda engine: engine.num_in_flight)
        affinity = request.affinity
        most_in_flight = least_loaded.num_in_flight + affinity.num_requests
        if affinity.engine in candidates and affinity.engine.num_in_flight < most_in_flight:
            return affinity.engine
        affinity.engine = least_loaded
        return least_loaded

    def _serving(self, engines: Sequence[EngineLoad]) -> list[EngineLoad]:
        return [engine for engine in engines if not self._health.why_out(engine.address.url)]


def _check_versions(sample: Sample, oldest: int) -> None:
    """Raise TransientError if weights drew tokens that the engine did not hold any more.

    It has started again since then, with those of its model's folder, unseen by its watch so far.
    """
    version = min((span.version for span in sample.versions), default=oldest)
    if version < oldest:
        raise TransientError(
            f"its tokens are drawn with weights {version} after a sync of {oldest}: the engine has"
            " started again"
        )
