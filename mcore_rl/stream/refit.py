"""The controller's side of a weight sync: engines and trainer ranks link up, a version moves, is committed.

staged    trainers send | engine ranks receive beside the decoding -> everyone agrees?
          -> pause -> begin -> swap -> end -> commit version -> resume
in place  pause -> begin -> trainers send | engine ranks receive -> all agree? -> end -> commit -> resume

An engine of which any rank failed is out of rotation until it was linked and synced anew, which each sync
tries. If its parameters may be a mixture of versions, it also stays paused.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import aiohttp

from mcore_rl.slices.layouts.recorded import RecordedLayouts
from mcore_rl.slices.layouts.sglang import SGLangSizes
from mcore_rl.stream.engine_control import EngineControl, EngineError
from mcore_rl.stream.linked_engine import LinkedEngine
from mcore_rl.stream.refit_report import EngineRefit, RefitReport, agreement, summary
from mcore_rl.stream.store import LinkStore
from mcore_rl.stream.wire import Link, Report

_log = logging.getLogger(__name__)

_GRACE_S = 10.0
"""How much longer than the ranks' own deadline the controller waits for their answers."""
_PROBE_S = 5.0
_SWAP_S = 5.0
"""What a swap gets at least, however long the transfer took."""


class RefitError(RuntimeError):
    """No engine could be brought to the new version, or an engine could not be connected."""


class TrainerRanks(Protocol):
    """All trainer ranks at once; each runs the method of the same name on its WeightSender."""

    @property
    def world_size(self) -> int: ...

    async def connect(self, link: Link) -> Sequence[Report]:
        """One report per rank, in rank order."""
        ...

    async def send(
        self, version: int, engines: Sequence[str], timeout_s: float
    ) -> Sequence[Mapping[str, Report]]:
        """Per rank, in rank order: engine -> report."""
        ...


Record = Callable[[SGLangSizes], RecordedLayouts]
Sent = Sequence[Mapping[str, Report]] | BaseException


class Refitter:
    """Keeps the engines on the trainer's weights. All calls must come from one event loop at a time."""

    def __init__(
        self,
        trainers: TrainerRanks,
        host: str = "127.0.0.1",
        bucket_mib: float = 4.0,
        timeout_s: float = 120.0,
        staged: bool = True,
        record: Record | None = None,
    ) -> None:
        """`host`: this process's address as all ranks reach it; `timeout_s` bounds each connect and sync.

        `staged`: engines receive beside the decoding, into memory of the size of their weights, and pause to
        swap only; else they pause for the whole transfer and need a few buckets per trainer rank.
        `record`: an engine's sizes -> the layouts of both sides, which spares the ranks listing their shards.
        """
        self._trainers = trainers
        self._host = host
        self._bucket_bytes = int(bucket_mib * 2**20)
        self._timeout_s = timeout_s
        self._staged, self._record = staged, record
        self._engines: dict[str, LinkedEngine] = {}
        self._lost: dict[str, str] = {}
        self._mixed: set[str] = set()
        """Engines whose parameters may be a mixture of versions; they are paused."""

    @property
    def linked(self) -> tuple[str, ...]:
        """Urls of the engines that `sync` brings up to date."""
        return tuple(self._engines)

    @property
    def in_rotation(self) -> tuple[str, ...]:
        """Urls of the engines that serve the newest version that any engine serves."""
        newest = max((e.serves for e in self._engines.values() if e.serves is not None), default=None)
        return tuple(url for url, e in self._engines.items() if newest is not None and e.serves == newest)

    def agreed_layouts(self, url: str) -> str:
        """How the ranks of a link came to their layouts, "recorded" or "listed", and the digest of those."""
        return self._engines[url].digest

    def served_version(self, url: str) -> int | None:
        """What the linked engine at `url` was last committed to."""
        return self._engines[url].serves

    async def connect(self, urls: Sequence[str]) -> None:
        """Link engines to the trainer ranks: all at the start, later those that failed or come late.

        RefitError names the rank that could not join and why; links to other engines are not touched.
        """
        async with self._http() as http:
            for url in urls:
                self._engines.pop(url, None)
                self._engines[url] = await self._connect(EngineControl(http, url))
                self._lost.pop(url, None)

    async def sync(self, version: int, urls: Sequence[str] | None = None) -> RefitReport:
        """Bring the linked engines (or those given) to the trainer's current weights, named `version`.

        Without `urls`, engines lost before are linked anew first, if they answer. Engines that fail are
        unlinked and are in `report.failed`. RefitError if all failed, as they do when the trainer ranks
        cannot be reached.
        """
        began_s = time.monotonic()
        async with self._http() as http:
            if urls is None:
                await self._readmit(http)
            chosen = self.linked if urls is None else tuple(urls)
            if not chosen or not set(chosen) <= set(self._engines):
                linked, lost = list(self.linked), self._lost
                raise RefitError(f"cannot sync {list(chosen)}: linked engines are {linked}, lost are {lost}")
            controls = [EngineControl(http, url) for url in chosen]
            bring = self._sync_staged if self._staged else self._sync_in_place
            refits = await bring(version, controls)
        for refit in refits:
            if refit.error is not None:
                del self._engines[refit.url]
        report = RefitReport(version, time.monotonic() - began_s, tuple(refits), dict(self._lost))
        self._lost |= report.failed
        if len(report.failed) == len(chosen):
            raise RefitError(f"no engine took version {version}: {'; '.join(report.failed.values())}")
        return report

    async def _readmit(self, http: aiohttp.ClientSession) -> None:
        for url in tuple(self._lost):
            control = EngineControl(http, url)
            try:
                await asyncio.wait_for(control.parallel_sizes(), _PROBE_S)
                self._engines[url] = await self._connect(control)
                del self._lost[url]
            except (EngineError, RefitError, TimeoutError) as error:
                _log.warning("engine %s stays out of rotation: %s", url, error)

    async def _connect(self, control: EngineControl) -> LinkedEngine:
        try:
            sizes = await control.parallel_sizes()
            if sizes.pp > 1 and not self._staged:
                raise RefitError(f"engine {control.url} has pp_size={sizes.pp}, which needs a staged sync")
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
            sent, loaded = await asyncio.gather(self._trainers.connect(link), loading, return_exceptions=True)
            if loaded is None:
                reports = await engine.reports_by("connect", deadline_s)
            else:
                reports = engine.reports("connect")
            await control.end_update()
            if control.url not in self._mixed:
                await control.resume()
        except EngineError as error:
            raise RefitError(f"engine {control.url} cannot be linked: {error}") from error
        if isinstance(sent, BaseException):
            raise RefitError(
                f"engine {control.url} cannot be linked: the trainer ranks failed: {sent}"
            ) from sent
        error = agreement([*sent, *reports], loaded)
        if error is not None:
            raise RefitError(f"engine {control.url} cannot be linked: {error}")
        engine.digest = sent[0].digest
        _log.info("engine %s is linked, layouts %s", control.url, engine.digest)
        return engine

    async def _sync_staged(self, version: int, controls: Sequence[EngineControl]) -> list[EngineRefit]:
        deadline_s = time.monotonic() + self._timeout_s + _GRACE_S
        sending = self._start_send(version, [c.url for c in controls])
        orders = (
            self._engines[c.url].order(version, partial(_has_failed, sending, c.url), deadline_s)
            for c in controls
        )
        received = await asyncio.gather(*orders)
        refits = self._judge(controls, received, await _outcome(sending), [None] * len(controls))
        staged = [self._swap(c, version, r, deadline_s) for c, r in zip(controls, refits, strict=True)]
        return await asyncio.gather(*staged)

    async def _swap(
        self, control: EngineControl, version: int, refit: EngineRefit, deadline_s: float
    ) -> EngineRefit:
        """Put the staged weights to use, between two decode steps."""
        if refit.error is not None:
            return refit
        engine = self._engines[control.url]
        began_s = time.monotonic()
        left_s = max(_SWAP_S, deadline_s - began_s)
        try:
            async with asyncio.timeout(left_s):
                try:
                    await self._open(control)
                    self._mixed.add(control.url)
                    await engine.command(control, "swap", version)
                    error = agreement(await engine.reports_by("swap", began_s + left_s))
                except EngineError as failure:
                    error = str(failure)
                return await self._close(control, version, replace(refit, error=error), began_s)
        except TimeoutError:
            error = f"engine {control.url} did not swap in version {version} within {left_s:.0f} s"
            return replace(refit, error=error, pause_seconds=time.monotonic() - began_s)

    async def _sync_in_place(self, version: int, controls: Sequence[EngineControl]) -> list[EngineRefit]:
        began_s = time.monotonic()
        opened = await asyncio.gather(*(self._open(c) for c in controls), return_exceptions=True)
        errors = {c.url: _engine_error(answer) for c, answer in zip(controls, opened, strict=True)}
        ready = [c for c in controls if errors[c.url] is None]
        moved: dict[str, EngineRefit] = {}
        if ready:
            sending = self._start_send(version, [c.url for c in ready])
            self._mixed |= {c.url for c in ready}
            loads = (self._engines[c.url].command(c, "receive", version) for c in ready)
            loaded = await asyncio.gather(*loads, return_exceptions=True)
            received = [self._engines[c.url].reports("receive") for c in ready]
            sent = await _outcome(sending)
            moved = {r.url: r for r in self._judge(ready, received, sent, loaded)}
        closing = (
            self._close(c, version, moved.get(c.url) or EngineRefit(c.url, error=errors[c.url]), began_s)
            for c in controls
        )
        return await asyncio.gather(*closing)

    async def _open(self, control: EngineControl) -> None:
        await control.pause()
        await control.begin_update()

    async def _close(
        self, control: EngineControl, version: int, refit: EngineRefit, began_s: float
    ) -> EngineRefit:
        """End the update; commit and resume if all went well, else leave the engine paused."""
        error = refit.error
        try:
            if error is None:
                await asyncio.gather(control.end_update(), control.commit(version))
                await control.resume()
                self._engines[control.url].serves = version
                self._mixed.discard(control.url)
            else:
                await control.end_update()
        except EngineError as failure:
            error = error or str(failure)
        return replace(refit, error=error, pause_seconds=time.monotonic() - began_s)

    def _start_send(self, version: int, urls: Sequence[str]) -> "asyncio.Future[Any]":
        sending = self._trainers.send(version, urls, self._timeout_s)
        return asyncio.ensure_future(asyncio.wait_for(sending, self._timeout_s + _GRACE_S))

    def _judge(
        self,
        controls: Sequence[EngineControl],
        received: Sequence[Sequence[Report]],
        sent: Sent,
        answers: Sequence[BaseException | None],
    ) -> list[EngineRefit]:
        """One verdict per engine on what trainer ranks, engine ranks and the engine itself said."""
        refits = []
        for control, reports, answer in zip(controls, received, answers, strict=True):
            of_trainers = [] if isinstance(sent, BaseException) else [ranks[control.url] for ranks in sent]
            error = agreement([*of_trainers, *reports], answer)
            if isinstance(sent, BaseException):
                why = str(sent) or f"no answer within {self._timeout_s + _GRACE_S:.0f} s"
                error = f"the trainer ranks failed: {why}" + (f"; {error}" if error else "")
            refits.append(summary(control.url, reports, error))
        return refits

    def _http(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._timeout_s + _GRACE_S))


async def _outcome(sending: "asyncio.Future[Any]") -> Sent:
    (sent,) = await asyncio.gather(sending, return_exceptions=True)
    return sent


def _has_failed(sending: "asyncio.Future[Any]", engine: str) -> bool:
    """Whether the trainer ranks are done with `engine`, and not well."""
    if not sending.done():
        return False
    return sending.exception() is not None or any(ranks[engine].error for ranks in sending.result())


def _engine_error(answer: BaseException | None) -> str | None:
    """What an EngineError says; any other error is raised."""
    if answer is not None and not isinstance(answer, EngineError):
        raise answer
    return None if answer is None else str(answer)
