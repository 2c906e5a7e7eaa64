"""A client of engines whose samples go to stores of this process, in place of collectors."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from mcore_rl.batches.local_stores import LocalStores
from mcore_rl.rollout.client import RolloutClient, RolloutSession
from mcore_rl.rollout.drafts import DraftCounts
from mcore_rl.rollout.paces import Paces
from mcore_rl.rollout.request import Sampling
from mcore_rl.types import Prompt, StoredSample


class StoringSession:
    """Implements sampling_client.SamplingSession."""

    def __init__(self, session: RolloutSession, stores: LocalStores) -> None:
        self._session = session
        self._stores = stores

    @property
    def num_open(self) -> int:
        return self._session.num_open

    @property
    def num_cut_off(self) -> int:
        return self._session.num_cut_off

    @property
    def is_held(self) -> bool:
        return self._session.is_held

    async def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[StoredSample]:
        return self._stores.keep(await self._session.generate(prompts, num_samples, sampling))

    async def hold(self, *, cut_off: bool) -> None:
        await self._session.hold(cut_off=cut_off)

    async def resume(self) -> None:
        await self._session.resume()


class StoringClient:
    """Implements sampling_client.SamplingClient; nothing is ever lost."""

    num_lost = 0
    num_losses = 0
    num_done = 0
    num_tokens = 0

    def __init__(self, client: RolloutClient, stores: LocalStores | None = None) -> None:
        self._client = client
        self.stores = stores or LocalStores()

    @property
    def max_in_flight(self) -> int:
        return self._client.max_in_flight

    def is_lost(self, sample: StoredSample) -> bool:
        return False

    def take_paces(self) -> Paces:
        return self._client.take_paces()

    def take_drafts(self) -> DraftCounts:
        return self._client.take_drafts()

    async def idle_seconds(self) -> float:
        return await self._client.idle_seconds()

    async def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[StoredSample]:
        return self.stores.keep(await self._client.generate(prompts, num_samples, sampling))

    @asynccontextmanager
    async def open(
        self, max_in_flight: int = 0, on_done: Callable[[], None] = lambda: None
    ) -> AsyncIterator[StoringSession]:
        async with self._client.open(max_in_flight, on_done) as session:
            yield StoringSession(session, self.stores)
