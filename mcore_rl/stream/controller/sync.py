"""The controller's side of a weight sync: engines and trainer ranks link up, a version moves, is committed.

staged    trainers send | engine ranks receive beside the decoding -> everyone agrees?
          -> pause -> begin -> swap -> end -> commit version -> resume
in place  pause -> begin -> trainers send | engine ranks receive -> all agree? -> end -> commit -> resume

An engine of which any rank failed is out of rotation until it was linked and synced anew. If its parameters
may be a mixture of versions, it also stays paused.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import aiohttp

from mcore_rl.process.http import open_session
from mcore_rl.slices.layouts.recorded import RecordedLayouts
from mcore_rl.slices.layouts.sglang_models import SGLangSizes
from mcore_rl.stream.controller.engine_control import EngineControl, EngineUpdateError
from mcore_rl.stream.controller.linked_engine import LinkedEngine
from mcore_rl.stream.controller.sync_report import SyncReport, agreement
from mcore_rl.stream.controller.update import (
    GRACE_S,
    InPlaceUpdate,
    StagedUpdate,
    TrainerRanks,
    Updated,
)
from mcore_rl.stream.link_store import LinkStore
from mcore_rl.stream.wire import Link

_log = logging.getLogger(__name__)


class SyncError(RuntimeError):
    """No engine could be brought to the new version, or an engine could not be connected."""


Record = Callable[[SGLangSizes], RecordedLayouts]


class SyncController:
    """Keeps the engines on the trainer's weights. All calls must come from one event loop at a time."""

    def __init__(
        self,
        trainers: TrainerRanks,
        host: str = "127.0.0.1",
        bucket_mib: float = 4.0,
        timeout_s: float = 120.0,
        staged: bool = True,
        relay: bool = True,
        record: Record | None = None,
    ) -> None:
        """`host`: this process's address as all ranks reach it; `timeout_s` bounds each connect and sync.

        `staged`: engines receive beside the decoding, into memory of the size of their weights, and pause to
        swap only; else they pause for the whole transfer and need a few buckets per trainer rank.
        `relay`: over staged links, engines with equal layouts pass slices on.
        `record`: an engine's sizes -> the layouts of both sides, which spares the ranks listing their shards.
        """
        self._trainers = trainers
        self._host = host
        self._bucket_bytes = int(bucket_mib * 2**20)
        self._timeout_s = timeout_s
        self._staged, self._record = staged, record
        self._engines: dict[str, LinkedEngine] = {}
        self._mixed: set[str] = set()
        """Engines whose parameters may be a mixture of versions; they are paused."""
        self._update = (
            StagedUpdate(trainers, timeout_s, self._mixed, host if relay else None)
            if staged
            else InPlaceUpdate(trainers, timeout_s, self._mixed)
        )

    @property
    def linked(self) -> tuple[str, ...]:
        """Urls of the engines that `sync` brings up to date."""
        return tuple(self._engines)

    @property
    def in_rotation(self) -> tuple[str, ...]:
        """Urls of the engines that serve the newest version that any engine serves."""
        newest = max(
            (e.serves for e in self._engines.values() if e.serves is not None), default=None
        )
        return tuple(
            url for url, e in self._engines.items() if newest is not None and e.serves == newest
        )

    def agreed_layouts(self, url: str) -> str:
        """How the ranks of a link came to their layouts, "recorded" or "listed", and the digest of those."""
        return self._engines[url].digest

    def served_version(self, url: str) -> int | None:
        """What the linked engine at `url` was last committed to."""
        return self._engines[url].serves

    async def connect(self, urls: Sequence[str]) -> None:
        """Link engines to the trainer ranks: all at the start, later those that failed or come late.

        SyncError names the rank that could not join and why; links to other engines are not touched.
        """
        async with self._http() as http:
            for url in urls:
                self._engines.pop(url, None)
                self._engines[url] = await self._connect(EngineControl(http, url))

    async def sync(self, version: int, urls: Sequence[str] | None = None) -> SyncReport:
        """Bring the linked engines (or those given) to the trainer's current weights, named `version`.

        Engines that fail are unlinked and are in `report.failed`. SyncError if all failed, as they do when
        the trainer ranks cannot be reached.
        """
        began_s = time.monotonic()
        chosen = self.linked if urls is None else tuple(urls)
        if not chosen or not set(chosen) <= set(self._engines):
            raise SyncError(f"cannot sync {list(chosen)}: linked engines are {list(self.linked)}")
        async with self._http() as http:
            updated = [Updated(self._engines[url], EngineControl(http, url)) for url in chosen]
            results = await self._update.run(version, updated)
        for result in results:
            if result.error is not None:
                del self._engines[result.url]
        report = SyncReport(version, time.monotonic() - began_s, tuple(results))
        if len(report.failed) == len(chosen):
            raise SyncError(
                f"no engine took version {version}: {'; '.join(report.failed.values())}"
            )
        return report

    async def _connect(self, control: EngineControl) -> LinkedEngine:
        try:
            sizes = await control.parallel_sizes()
            if sizes.pp > 1 and not self._staged:
                raise SyncError(
                    f"engine {control.url} has pp_size={sizes.pp}, which needs a staged sync"
                )
            deadline_s = time.monotonic() + self._timeout_s
            store = LinkStore.serve(self._host, self._timeout_s)
            link = Link(
                engine=control.url,
                store_host=self._host,
                store_port=store.port,
                num_senders=self._trainers.world_size,
                num_receivers=sizes.engine_ranks,
                bucket_bytes=self._bucket_bytes,
                timeout_s=self._timeout_s,
                staged=self._staged,
                layouts="" if self._record is None else self._record(sizes).encode(),
            )
            engine = LinkedEngine(link, store, sizes.tp)
            await control.pause()
            await control.begin_update()
            loading = engine.command(control, "connect")
            sent, loaded = await asyncio.gather(
                self._trainers.connect(link), loading, return_exceptions=True
            )
            if loaded is None:
                reports = await engine.reports_by("connect", deadline_s)
            else:
                reports = engine.reports("connect")
            await control.end_update()
            if control.url not in self._mixed:
                await control.resume()
        except EngineUpdateError as error:
            raise SyncError(f"engine {control.url} cannot be linked: {error}") from error
        if isinstance(sent, BaseException):
            raise SyncError(
                f"engine {control.url} cannot be linked: the trainer ranks failed: {sent}"
            ) from sent
        error = agreement([*sent, *reports], loaded)
        if error is not None:
            raise SyncError(f"engine {control.url} cannot be linked: {error}")
        engine.digest = sent[0].digest
        _log.info("engine %s is linked, layouts %s", control.url, engine.digest)
        return engine

    def _http(self) -> aiohttp.ClientSession:
        return open_session(self._timeout_s + GRACE_S)
