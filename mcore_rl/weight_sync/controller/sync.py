"""Links engines to the trainer ranks and brings them to the trainer's current weights.

All engines are linked at once; each succeeds or fails by itself (linker.py). If any rank of an
engine fails, the engine is out of rotation until it is linked and synced again. If the engine's
parameters may mix versions, the engine also stays paused.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import aiohttp

from mcore_rl.process.http import open_session
from mcore_rl.process.server_keys import ServerKeys, admin_headers
from mcore_rl.weight_sync.controller.adapter_sync import AdapterSync
from mcore_rl.weight_sync.controller.engine_control import EngineCallError, EngineControl
from mcore_rl.weight_sync.controller.factor_sync import FactorOptions, FactorSync
from mcore_rl.weight_sync.controller.linked_engine import LinkedEngine
from mcore_rl.weight_sync.controller.linker import EngineLinker, LinkError
from mcore_rl.weight_sync.controller.strategy import (
    GRACE_S,
    InPlaceSync,
    StagedSync,
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
"""Sizes of an engine -> recorded layouts of both sides of its link."""


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
        pull: bool = False,
        record: RecordLayouts | None = None,
        keys: ServerKeys | None = None,
        verify_every: int = 0,
        trace_all: bool = False,
        loaded: bool = False,
        factors: Sequence[FactorOptions] = (),
    ) -> None:
        """Make a controller without engines.

        host       this process's address for all ranks
        timeout_s  bounds each connect and each sync
        staged     engines receive while they decode, into a second set of weights, and pause to
                   swap; else they pause all the time, and need a few buckets a rank
        relay      over staged links, engines of equal layouts forward slices to one another
        delta, pull, trace_all  as in wire.Link
        record     makes recorded layouts, so that ranks need not list their shards
        keys       the engines' keys; None if the engines have none
        verify_every  which syncs are compared with the trainer's checksums, as in is_read_back
        loaded     engines and ranks loaded one checkpoint: until a version was synced, sent weights
                   are compared with those that an engine loaded
        factors    of adapters that engines serve, or of one that they merge; empty: weights travel
        """
        self._trainers = trainers
        self._host = host
        self._bucket_bytes = int(bucket_mib * 2**20)
        self._timeout_s = timeout_s
        self._staged = staged
        self._delta = delta
        self._pull = pull
        self._trace_all = trace_all
        self._loaded = loaded
        self._record = record
        self._headers = admin_headers(keys)
        self._engines: dict[str, LinkedEngine] = {}
        self._facts: Sequence[bytes] = ()  # each trainer rank's, once it is known
        self._layouts_of: dict[SGLangSizes, str] = {}
        self._mixed: set[str] = set()
        """Urls of engines whose parameters may mix versions; they are paused."""
        self._serves_adapter = any(options.name for options in factors)
        self._strategy = self._make_strategy(relay, verify_every, factors)

    def _make_strategy(
        self, relay: bool, verify_every: int, factors: Sequence[FactorOptions]
    ) -> SyncStrategy:
        sides = self._trainers, self._timeout_s, self._mixed
        if not self._staged:
            assert not factors, "factors need a second set of parameters"
            return InPlaceSync(*sides, verify_every)
        relay_host = self._host if relay else None
        if not factors:
            return StagedSync(*sides, relay_host, verify_every)
        make = AdapterSync if self._serves_adapter else FactorSync
        return make(*sides, relay_host, verify_every, factors, self._host)

    @property
    def linked(self) -> tuple[str, ...]:
        """Urls of the engines that `sync` brings up to date."""
        return tuple(self._engines)

    @property
    def in_rotation(self) -> tuple[str, ...]:
        """Urls of the engines that serve the newest of all served versions."""
        served = {url: engine.served_version for url, engine in self._engines.items()}
        newest = max((version for version in served.values() if version is not None), default=None)
        if newest is None:
            return ()
        return tuple(url for url, version in served.items() if version == newest)

    def get_agreed_layouts(self, url: str) -> str:
        """Return the origin of the layouts, "recorded" or "listed", and the plan's digest."""
        return self._engines[url].digest

    def find_version(self, url: str) -> int | None:
        """Return the version last committed on the linked engine at `url`."""
        return self._engines[url].served_version

    def forget_links(self) -> None:
        """Unlink all engines, and forget the trainer ranks, which others have replaced.

        Engines go on serving the weights that they have.
        """
        self._facts = ()
        self._engines.clear()
        self._loaded = False
        if isinstance(self._strategy, FactorSync):
            self._strategy.forget_trainers()

    def record_by(self, record: RecordLayouts) -> None:
        """Make recorded layouts by `record` from now on, as trainer ranks go on in another one."""
        self._record = record
        self._layouts_of.clear()

    def choose_adapter(self, name: str) -> None:
        """Have later syncs bring versions of one of several adapters.

        The first sync of an engine that was linked anew brings all of them.
        """
        assert isinstance(self._strategy, FactorSync), "engines get all weights"
        self._strategy.choose(name)

    def unlink(self, url: str) -> None:
        """Forget an engine that has left."""
        self._engines.pop(url, None)
        self._mixed.discard(url)

    async def connect(self, urls: Sequence[str]) -> None:
        """Link engines to the trainer ranks at the same time.

        At the start these are all engines, later engines that failed or joined. Raises SyncError,
        which names each engine that could not be linked, the rank and the cause; all other engines
        are linked.
        """
        for url in urls:
            self._engines.pop(url, None)
        async with self._open_http() as http:
            linker = EngineLinker(self._trainers, {"weights": await self._ask_facts(urls)})
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

    async def _ask_facts(self, urls: Sequence[str]) -> Sequence[bytes]:
        """Return the facts of the trainer ranks; ask the ranks once."""
        if not self._facts:
            try:
                self._facts = await self._trainers.describe()
            except (RuntimeError, OSError) as error:
                message = f"cannot be linked: the trainer ranks failed: {error}"
                failed = {url: f"engine {url} {message}" for url in urls}
                raise SyncError("; ".join(failed.values()), failed) from error
        return self._facts

    async def sync(self, version: int, urls: Sequence[str] | None = None) -> SyncReport:
        """Bring linked engines, by default all, to the trainer's current weights, named `version`.

        Engines that fail are unlinked and are in `report.failed`. Raises SyncError if all engines
        fail, as when the trainer ranks cannot be reached.
        """
        began_s = time.monotonic()
        chosen = self.linked if urls is None else tuple(urls)
        if not chosen or not set(chosen) <= set(self._engines):
            raise SyncError(f"cannot sync {list(chosen)}: linked engines are {list(self.linked)}")
        async with self._open_http() as http:
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
        sizes = await control.read_parallel_sizes()
        if sizes.pp > 1 and not self._staged:
            raise LinkError(f"its pp_size={sizes.pp} needs a staged sync")
        deadline_s = time.monotonic() + self._timeout_s
        engine = self._make_engine(control.url, sizes)
        await control.pause()
        await control.begin_update()
        try:
            engine.digest = await linker.link(control, engine, deadline_s)
        except LinkError:
            with suppress(EngineCallError):  # The error of the link says more.
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
        """Return a new LinkedEngine, and start the store of its link."""
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
            pull=self._pull,
            trace_all=self._trace_all,
            loaded=self._loaded and url not in self._mixed,
            layouts=self._record_layouts(sizes),
            unadapted=self._serves_adapter,
        )
        return LinkedEngine(link, store, sizes.tp)

    def _record_layouts(self, sizes: SGLangSizes) -> str:
        """Return the recorded layouts of engines of these sizes, or "" without."""
        if self._record is None:
            return ""
        if sizes not in self._layouts_of:
            self._layouts_of[sizes] = self._record(sizes).encode()
        return self._layouts_of[sizes]

    def _open_http(self) -> aiohttp.ClientSession:
        return open_session(self._timeout_s + GRACE_S, self._headers)
