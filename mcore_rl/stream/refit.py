"""The controller's side of a weight sync: engines and trainer ranks link up, a version moves, is committed.

pause -> begin -> trainers send | engine ranks receive -> everyone agrees? -> end -> commit version -> resume

An engine of which any rank failed stays paused and out of rotation until it was connected and synced anew.
"""

import asyncio
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from mcore_rl.stream.engine_control import EngineControl, EngineError
from mcore_rl.stream.store import LinkStore
from mcore_rl.stream.wire import Link, Report, encode_command

_GRACE_S = 10.0
"""How much longer than the ranks' own deadline the controller waits for their answers."""


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


@dataclass(frozen=True)
class EngineRefit:
    """What one engine's sync took; `error` is None if it serves the new version."""

    url: str
    num_bytes: int = 0
    num_buckets: int = 0
    transfer_seconds: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class RefitReport:
    """Seconds from the first pause to the last resume; the transfer is the part in which bytes move."""

    version: int
    seconds: float
    engines: tuple[EngineRefit, ...]

    @property
    def failed(self) -> dict[str, str]:
        """Engine url -> why it is out of rotation."""
        return {engine.url: engine.error for engine in self.engines if engine.error is not None}

    def metrics(self) -> dict[str, float]:
        return {
            "refit/seconds": self.seconds,
            "refit/transfer_seconds": max(engine.transfer_seconds for engine in self.engines),
            "refit/mib": sum(engine.num_bytes for engine in self.engines) / 2**20,
            "refit/engines_failed": float(len(self.failed)),
        }


@dataclass
class _Engine:
    """A linked engine; its store lives as long as the link, and the store's keys with it."""

    link: Link
    store: LinkStore
    tp_size: int
    serves: int | None = None
    """The version it was last committed to."""


class Refitter:
    """Keeps the engines on the trainer's weights. All calls must come from one event loop at a time."""

    def __init__(
        self,
        trainers: TrainerRanks,
        host: str = "127.0.0.1",
        bucket_mib: float = 8.0,
        timeout_s: float = 120.0,
    ) -> None:
        """`host`: this process's address as all ranks reach it; `timeout_s` bounds each connect and sync."""
        self._trainers = trainers
        self._host = host
        self._bucket_bytes = int(bucket_mib * 2**20)
        self._timeout_s = timeout_s
        self._engines: dict[str, _Engine] = {}

    @property
    def linked(self) -> tuple[str, ...]:
        """Urls of the engines that `sync` brings up to date."""
        return tuple(self._engines)

    @property
    def in_rotation(self) -> tuple[str, ...]:
        """Urls of the engines that serve the newest version that any engine serves."""
        newest = max((e.serves for e in self._engines.values() if e.serves is not None), default=None)
        return tuple(url for url, e in self._engines.items() if newest is not None and e.serves == newest)

    async def connect(self, urls: Sequence[str]) -> None:
        """Link engines to the trainer ranks: all at the start, later those that failed or come late.

        RefitError names the rank that could not join and why; links to other engines are not touched.
        """
        async with self._http() as http:
            for url in urls:
                self._engines.pop(url, None)
                self._engines[url] = await self._connect(EngineControl(http, url))

    async def sync(self, version: int, urls: Sequence[str] | None = None) -> RefitReport:
        """Bring the linked engines (or those given) to the trainer's current weights, named `version`.

        Engines that fail are unlinked, stay paused, and are in `report.failed`. RefitError if all failed, as
        they do when the trainer ranks cannot be reached.
        """
        urls = self.linked if urls is None else tuple(urls)
        if not urls or not set(urls) <= set(self._engines):
            raise RefitError(f"cannot sync {list(urls)}: linked engines are {list(self.linked)}")
        began_s = time.monotonic()
        async with self._http() as http:
            controls = [EngineControl(http, url) for url in urls]
            errors = dict(zip(urls, await _attempt(self._open(c) for c in controls), strict=True))
            outcome = await self._move(version, [c for c in controls if errors[c.url] is None])
            refits = [
                outcome[c.url] if errors[c.url] is None else EngineRefit(c.url, error=str(errors[c.url]))
                for c in controls
            ]
            closed = await asyncio.gather(
                *(self._close(c, version, refit) for c, refit in zip(controls, refits, strict=True))
            )
        report = RefitReport(version, time.monotonic() - began_s, tuple(closed))
        if len(report.failed) == len(urls):
            raise RefitError(f"no engine took version {version}: {'; '.join(report.failed.values())}")
        return report

    async def _connect(self, control: EngineControl) -> _Engine:
        try:
            tp_size, pp_size = await control.parallel_sizes()
            store = LinkStore.serve(self._host, self._timeout_s)
            link = Link(
                engine=control.url,
                store_host=self._host,
                store_port=store.port,
                num_senders=self._trainers.world_size,
                num_receivers=tp_size * pp_size,
                bucket_bytes=self._bucket_bytes,
                timeout_s=self._timeout_s,
            )
            engine = _Engine(link, store, tp_size)
            await control.begin_update()
            sent, loaded = await asyncio.gather(
                self._trainers.connect(link), self._load(control, engine, None), return_exceptions=True
            )
            await control.end_update()
        except EngineError as error:
            raise RefitError(f"engine {control.url} cannot be linked: {error}") from error
        if isinstance(sent, BaseException):
            raise RefitError(f"engine {control.url} cannot be linked: the trainer ranks failed") from sent
        error = _agreement([*sent, *_reports(engine, None)], loaded)
        if error is not None:
            raise RefitError(f"engine {control.url} cannot be linked: {error}")
        return engine

    async def _open(self, control: EngineControl) -> None:
        await control.pause()
        await control.begin_update()

    async def _move(self, version: int, controls: Sequence[EngineControl]) -> dict[str, EngineRefit]:
        """Send and receive side by side; failures are in what is returned."""
        if not controls:
            return {}
        urls = [control.url for control in controls]
        sending = asyncio.ensure_future(self._trainers.send(version, urls, self._timeout_s))
        loads = (self._load(c, self._engines[c.url], version) for c in controls)
        loaded = await asyncio.gather(*loads, return_exceptions=True)
        (sent,) = await asyncio.gather(sending, return_exceptions=True)
        refits = {}
        for control, answer in zip(controls, loaded, strict=True):
            received = _reports(self._engines[control.url], version)
            if isinstance(sent, BaseException):
                refits[control.url] = EngineRefit(control.url, error=f"the trainer ranks failed: {sent}")
            else:
                error = _agreement([*(ranks[control.url] for ranks in sent), *received], answer)
                refits[control.url] = _refit(control.url, received, error)
        return refits

    async def _load(self, control: EngineControl, engine: _Engine, version: int | None) -> None:
        command_u8 = encode_command(engine.link, version)
        await control.run_loader(command_u8, engine.tp_size, flush_cache=version is not None)

    async def _close(self, control: EngineControl, version: int, refit: EngineRefit) -> EngineRefit:
        """End the update; commit and resume if all went well, else unlink the engine and leave it paused."""
        error = refit.error
        try:
            await control.end_update()
            if error is None:
                await control.commit(version)
                await control.resume()
                self._engines[control.url].serves = version
                return refit
        except EngineError as failure:
            error = error or str(failure)
        del self._engines[control.url]
        return EngineRefit(control.url, error=error)

    def _http(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._timeout_s + _GRACE_S))


def _reports(engine: _Engine, version: int | None) -> list[Report]:
    """What the engine's ranks said, taken out of the store; a rank that said nothing counts as failed."""
    ranks = range(engine.link.num_senders, len(engine.link.names))
    found = [engine.store.take_report(version, rank) for rank in ranks]
    silent = "did not report (see the engine's log)"
    return [
        report or Report(engine.link.names[rank], error=silent, peer_lost=True)
        for rank, report in zip(ranks, found, strict=True)
    ]


def _agreement(reports: Sequence[Report], answer: BaseException | None) -> str | None:
    """None if every rank and the engine report success with one plan, else the error nearest the cause."""
    failed = sorted((r for r in reports if r.error is not None), key=lambda r: r.peer_lost)
    if failed:
        others = f" (and {len(failed) - 1} more ranks failed)" if len(failed) > 1 else ""
        return f"{failed[0].rank}: {failed[0].error}{others}"
    if answer is not None:
        return str(answer)
    digests = {report.digest for report in reports}
    return None if len(digests) == 1 else f"ranks followed different plans: {sorted(digests)}"


def _refit(url: str, received: Sequence[Report], error: str | None) -> EngineRefit:
    return EngineRefit(
        url,
        sum(report.num_bytes for report in received),
        sum(report.num_buckets for report in received),
        max(report.seconds for report in received),
        error,
    )


async def _attempt(calls: Iterable[Awaitable[None]]) -> list[BaseException | None]:
    """Run side by side; None or the EngineError of each, anything else is raised."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if result is not None and not isinstance(result, EngineError):
            raise result
    return results
