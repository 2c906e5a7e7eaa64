"""Two collectors on fake engines; their processes can die and come back without their samples."""

from dataclasses import replace

from mcore_rl.batches.sample_store import SampleStore
from mcore_rl.config import RolloutConfig
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.rollout.client import RolloutClient
from mcore_rl.rollout.collector import (
    Collector,
    CollectorCommands,
    CollectorEvents,
    CollectorLostError,
)
from mcore_rl.rollout.collector_pool import CollectorPool
from mcore_rl.rollout.engine_health import EngineHealth
from mcore_rl.rollout.request import Sampling
from mcore_rl.rollout.transport import HttpOptions
from mcore_rl.types import Prompt
from tests.support.fake_sglang import FakeSGLang

CONFIG = RolloutConfig(max_response_len=3, retries=0, max_concurrency=4)
SAMPLING = Sampling(3)
PROMPTS = [Prompt(i, (1, 2 + i), (), "unit", "") for i in range(6)]


class Losable(Collector):
    """A collector whose process can die and, while its node is there, come back without samples."""

    is_dead = False
    node_is_there = True
    first_group = -1

    def __init__(self, client: RolloutClient, health: EngineHealth, store: SampleStore) -> None:
        super().__init__(client, health, store)
        self.parts = client, health, store

    async def die(self) -> None:
        self.is_dead = True
        self._has_events.set()
        for task in list(self._tasks.values()):
            task.cancel()

    async def submit(self, commands: CollectorCommands) -> None:
        self._check()
        await super().submit(commands)

    async def poll_events(self, wait_s: float, gather_s: float = 0.0) -> CollectorEvents:
        self._check()
        events = await super().poll_events(wait_s, gather_s)
        self._check()
        return events

    async def hold(self, session: int, cut_off: bool) -> int:
        self._check()
        return await super().hold(session, cut_off)

    async def idle_seconds(self) -> float:
        self._check()
        return await super().idle_seconds()

    async def restart(self, first_group: int) -> bool:
        self.first_group = first_group
        if not self.node_is_there:
            return False
        client, health, store = self.parts
        store.drop(range(first_group))
        Collector.__init__(self, client, health, store)
        self.is_dead = False
        return True

    def _check(self) -> None:
        if self.is_dead:
            raise CollectorLostError("collector rank died (killed)")


class CollectorScene:
    """Two collectors with an engine each."""

    def __init__(self, loop: EventLoop, retries: int = 0) -> None:
        self.run = loop.run
        rollout = replace(CONFIG, retries=retries)
        self.engines = [FakeSGLang(loop), FakeSGLang(loop)]
        urls = [engine.url for engine in self.engines]
        addresses = [engine.address for engine in self.engines]
        self.stores = [SampleStore(), SampleStore()]
        self.collectors: list[Losable] = []
        transport = HttpOptions.make(CONFIG, [9], str).open
        for k, (url, store) in enumerate(zip(urls, self.stores, strict=True)):
            health = EngineHealth(urls)
            client = RolloutClient(addresses, rollout, transport, health, own=[url], home=k)
            self.collectors.append(Losable(client, health, store))
        self.health = EngineHealth(urls)
        self.pool = CollectorPool(
            self.collectors, [[url] for url in urls], self.health, CONFIG.max_concurrency
        )

    def num_kept(self) -> list[int]:
        return [store.num_groups for store in self.stores]

    def prompts_of(self, engine: int) -> set[int]:
        return {body["input_ids"][1] - 2 for body in self.engines[engine].sampled}
