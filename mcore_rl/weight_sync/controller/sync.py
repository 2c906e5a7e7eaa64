"""Links engines to the trainer ranks and brings them to the trainer's current weights.

An engine of which any rank failed is out of rotation until it is linked and synced again. If its
parameters may mix versions, it also stays paused.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import aiohttp

from mcore_rl.process.http import open_session
from mcore_rl.process.server_keys import ServerKeys, admin_headers
from mcore_rl.weight_sync.controller.engine_control import EngineCallError, EngineControl
from mcore_rl.weight_sync.controller.linked_engine import LinkedEngine
from mcore_rl.weight_sync.controller.linking import EngineLinker, LinkError
from mcore_rl.weight_sync.controller.staged_sync import StagedSync
from mcore_rl.weight_sync.controller.strategy import (
    GRACE_S,
    InPlaceSync,
    SyncStrategy,
    SyncTarget,
    TrainerRanks,
)
from mcore_rl.weight_sync.controller.sync_report import SyncReport
from mcore_rl.weight_sync.link_store import LinkStore
from mcore_rl.weight_sync.wire import Link
from mcore_rl.weights.layouts.listed import RecordedLayouts
from mcore_rl.weights.layouts.sglang_models import SGLangSizes

_log = logging.getLogger(__name__)

RecordLayouts = Callable[[SGLangSizes], RecordedLayouts]
"""The sizes of an engine -> the recorded layouts of both sides of its link."""


class SyncError(RuntimeError):
    """No engine could be brought to the new version, or engines could not be linked.

    failed  url of each engine that could not be linked -> why
    """

    def __init__(self, message: str, failed: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.failed = dict(failed or {})


class SyncController:
    """Keeps engines on the trainer's weights. All calls must come from one event loop at a time."""

    def __init__(
        self,
        trainers: TrainerRanks,
        host: str = "127.0.0.1",
        bucket_mib: float = 4.0,
        timeout_s: float = 120.0,
        staged: bool = True,
        relay: bool = True,
        delta: str = "off",
        record: RecordLayouts | None = None,
        keys: ServerKeys | None = None,
        verify_every: int = 0,
        trace_all: bool = False,
        loaded: bool = False,
    ) -> None:
        """Make a controller without engines.

        host       this process's address as all ranks reach it
        timeout_s  bounds each connect and each sync
        staged     engines receive while they decode, into memory of the size of their weights, and
                   pause only to swap; otherwise they pause for the whole transfer and need memory
                   for a few buckets per trainer rank
        relay      over staged links, engines with equal layouts forward slices to one another
        delta      as in stream.wire.Link
        record     recorded layouts spare ranks listing their shards for one another
        keys       open the engines; None if they were started without
        verify_every  a link's first syncs and every so many after are read back from the engine's
                   live parameters and compared with the trainer's checksums; 0: none is
        trace_all  as in stream.wire.Link
        loaded     engines and trainer ranks loaded one checkpoint: until a version was synced, what
                   is sent is compared with what an engine loaded
        """
        self._trainers = trainers
        self._host = host
        self._bucket_bytes = int(bucket_mib * 2**20)
        self._timeout_s = timeout_s
        self._staged = staged
        self._delta = delta
        self._trace_all = trace_all
        self._loaded = loaded
        self._record = record
        self._headers = admin_headers(keys)
        self._engines: dict[str, LinkedEngine] = {}
        self._facts: Sequence[bytes] = ()
        """Each trainer rank's, once it is known."""
        self._layouts_of: dict[SGLangSizes, str] = {}
        self._mixed: set[str] = set()
        """Urls of engines whose parameters may mix versions; they are paused."""
        self._strategy = self._make_strategy(staged, relay, verify_every)

    def _make_strategy(self, staged: bool, relay: bool, verify_every: int) -> SyncStrategy:
        if not staged:
            return InPlaceSync(self._trainers, self._timeout_s, self._mixed, verify_every)
        relay_host = self._host if relay else None
        return StagedSync(self._trainers, self._timeout_s, self._mixed, relay_host, verify_every)

    @property
    def linked(self) -> tuple[str, ...]:
        """Urls of the engines that `sync` brings up to date."""
        return tuple(self._engines)

    @property
    def in_rotation(self) -> tuple[str, ...]:
        """Urls of the engines that serve the newest version that any engine serves."""
        served = {url: engine.served_version for url, engine in self._engines.items()}
        newest = max((version for version in served.values() if version is not None), default=None)
        if newest is None:
            return ()
        return tuple(url for url, version in served.items() if version == newest)

    def agreed_layouts(self, url: str) -> str:
        """Return how the ranks came to their layouts ("recorded" or "listed"), and the digest."""
        return self._engines[url].digest

    def served_version(self, url: str) -> int | None:
        """Return the version last committed on the linked engine at `url`."""
        return self._engines[url].served_version

    async def connect(self, urls: Sequence[str]) -> None:
        """Link engines to the trainer ranks at once: all at the start, later those that failed or
        joined.

        Raises SyncError, which names each engine that could not be linked, the rank and why; the
        other engines are linked.
        """
        for url in urls:
            self._engines.pop(url, None)
        async with self._http() as http:
            linker = EngineLinker(self._trainers, await self._trainer_facts(urls))
            outcomes = await asyncio.gather(
                *(self._connect(linker, EngineControl(http, url)) for url in urls),
                return_exceptions=True,
            )
        failed: dict[str, str] = {}
        for url, outcome in zip(urls, outcomes, strict=True):
            if isinstance(outcome, LinkedEngine):
                self._engines[url] = outcome
            elif isinstance(outcome, (EngineCallError, LinkError)):
                failed[url] = f"engine {url} cannot be linked: {outcome}"
            else:
                raise outcome
        if failed:
            raise SyncError("; ".join(failed.values()), failed)

    async def _trainer_facts(self, urls: Sequence[str]) -> Sequence[bytes]:
        """Return the facts of the trainer ranks, which are asked for them once."""
        if not self._facts:
            try:
                self._facts = await self._trainers.describe()
            except (RuntimeError, OSError) as error:
                message = f"cannot be linked: the trainer ranks failed: {error}"
                failed = {url: f"engine {url} {message}" for url in urls}
                raise SyncError("; ".join(failed.values()), failed) from error
        return self._facts

    async def sync(self, version: int, urls: Sequence[str] | None = None) -> SyncReport:
        """Bring the linked engines (or those given) to the trainer's current weights, named
        `version`.

        Engines that fail are unlinked and are in `report.failed`. Raises SyncError if all fail, as
        they do when the trainer ranks cannot be reached.
        """
        began_s = time.monotonic()
        chosen = self.linked if urls is None else tuple(urls)
        if not chosen or not set(chosen) <= set(self._engines):
            raise SyncError(f"cannot sync {list(chosen)}: linked engines are {list(self.linked)}")
        async with self._http() as http:
            targets = [SyncTarget(self._engines[url], EngineControl(http, url)) for url in chosen]
            results = await self._strategy.run(version, targets)
        for result in results:
            if result.error is not None:
                del self._engines[result.url]
        report = SyncReport(version, time.monotonic() - began_s, tuple(results))
        if len(report.failed) == len(chosen):
            raise SyncError(
                f"no engine took version {version}: {'; '.join(report.failed.values())}"
            )
        self._loaded = False
        return report

    async def _connect(self, linker: EngineLinker, control: EngineControl) -> LinkedEngine:
        sizes = await control.parallel_sizes()
        if sizes.pp > 1 and not self._staged:
            raise LinkError(f"its pp_size={sizes.pp} needs a staged sync")
        deadline_s = time.monotonic() + self._timeout_s
        engine = self._make_engine(control.url, sizes)
        await control.pause()
        await control.begin_update()
        try:
            engine.digest = await linker.link(control, engine, deadline_s)
        except LinkError:
            with suppress(EngineCallError):  # why it was not linked says more
                await self._release(control)
            raise
        await self._release(control)
        _log.info("engine %s is linked, layouts %s", control.url, engine.digest)
        return engine

    async def _release(self, control: EngineControl) -> None:
        """Let the engine generate again, unless its parameters may mix versions."""
        await control.end_update()
        if control.url not in self._mixed:
            await control.resume()

    def _make_engine(self, url: str, sizes: SGLangSizes) -> LinkedEngine:
        """Start the store of a new link to the engine."""
        store = LinkStore.serve(self._host, self._timeout_s)
        link = Link(
            engine=url,
            store_host=self._host,
            store_port=store.port,
            store_key=store.key,
            num_senders=self._trainers.world_size,
            num_receivers=sizes.engine_ranks,
            bucket_bytes=self._bucket_bytes,
            timeout_s=self._timeout_s,
            staged=self._staged,
            delta=self._delta,
            trace_all=self._trace_all,
            loaded=self._loaded and url not in self._mixed,
            layouts=self._layouts(sizes),
        )
        return LinkedEngine(link, store, sizes.tp)

    def _layouts(self, sizes: SGLangSizes) -> str:
        """Return the recorded layouts of engines of these sizes, or "" without."""
        if self._record is None:
            return ""
        if sizes not in self._layouts_of:
            self._layouts_of[sizes] = self._record(sizes).encode()
        return self._layouts_of[sizes]

    def _http(self) -> aiohttp.ClientSession:
        return open_session(self._timeout_s + GRACE_S, self._headers)
