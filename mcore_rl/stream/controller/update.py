"""One version to linked engines: what trainer and engine ranks are told, and one verdict per engine out."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

from mcore_rl.stream.controller.engine_control import EngineControl, EngineUpdateError
from mcore_rl.stream.controller.linked_engine import LinkedEngine, Relay
from mcore_rl.stream.controller.sync_report import EngineSyncResult, agreement, summary
from mcore_rl.stream.wire import Link, Order, Report

_log = logging.getLogger(__name__)

GRACE_S = 10.0
"""How much longer than the ranks' own deadline the controller waits for their answers."""
_SWAP_S = 5.0
"""What a swap gets at least, however long the transfer took."""


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


Sent = Sequence[Mapping[str, Report]] | BaseException


@dataclass(frozen=True)
class Updated:
    """An engine during an update, and how to call it."""

    engine: LinkedEngine
    control: EngineControl

    @property
    def url(self) -> str:
        return self.control.url


class Update(ABC):
    """What both ways of moving a version have in common."""

    def __init__(self, trainers: TrainerRanks, timeout_s: float, mixed: set[str]) -> None:
        """`mixed`: urls of the engines whose parameters may be a mixture of versions; they stay paused."""
        self._trainers, self._timeout_s, self._mixed = trainers, timeout_s, mixed

    @abstractmethod
    async def run(self, version: int, engines: Sequence[Updated]) -> list[EngineSyncResult]:
        """In the order of the engines."""

    async def _open(self, control: EngineControl) -> None:
        await control.pause()
        await control.begin_update()

    async def _close(
        self, updated: Updated, version: int, result: EngineSyncResult, began_s: float
    ) -> EngineSyncResult:
        """End the update; commit and resume if all went well, else leave the engine paused."""
        control, error = updated.control, result.error
        try:
            if error is None:
                await asyncio.gather(control.end_update(), control.commit(version))
                await control.resume()
                updated.engine.serves = version
                self._mixed.discard(control.url)
            else:
                await control.end_update()
        except EngineUpdateError as failure:
            error = error or str(failure)
        return replace(result, error=error, pause_seconds=time.monotonic() - began_s)

    def _start_send(self, version: int, urls: Sequence[str]) -> "asyncio.Future[Any]":
        sending = self._trainers.send(version, urls, self._timeout_s)
        return asyncio.ensure_future(asyncio.wait_for(sending, self._timeout_s + GRACE_S))

    def _judge(
        self, url: str, received: Sequence[Report], sent: Sent, answer: BaseException | None = None
    ) -> EngineSyncResult:
        """The verdict on what trainer ranks, engine ranks and the engine itself said."""
        of_trainers = [] if isinstance(sent, BaseException) else [ranks[url] for ranks in sent]
        error = agreement([*of_trainers, *received], answer)
        if isinstance(sent, BaseException):
            why = str(sent) or f"no answer within {self._timeout_s + GRACE_S:.0f} s"
            error = f"the trainer ranks failed: {why}" + (f"; {error}" if error else "")
        return summary(url, received, error)


class InPlaceUpdate(Update):
    """Slices land in the parameters of paused engines."""

    async def run(self, version: int, engines: Sequence[Updated]) -> list[EngineSyncResult]:
        began_s = time.monotonic()
        opened = await asyncio.gather(
            *(self._open(e.control) for e in engines), return_exceptions=True
        )
        errors = {e.url: _engine_error(answer) for e, answer in zip(engines, opened, strict=True)}
        ready = [e for e in engines if errors[e.url] is None]
        moved: dict[str, EngineSyncResult] = {}
        if ready:
            sending = self._start_send(version, [e.url for e in ready])
            self._mixed |= {e.url for e in ready}
            loads = (e.engine.command(e.control, "receive", version) for e in ready)
            loaded = await asyncio.gather(*loads, return_exceptions=True)
            received = [e.engine.reports("receive") for e in ready]
            sent = await _outcome(sending)
            for e, reports, answer in zip(ready, received, loaded, strict=True):
                moved[e.url] = self._judge(e.url, reports, sent, answer)
        closing = (
            self._close(
                e,
                version,
                moved.get(e.url) or EngineSyncResult(e.url, error=errors[e.url]),
                began_s,
            )
            for e in engines
        )
        return await asyncio.gather(*closing)


class StagedUpdate(Update):
    """Slices land beside the parameters while engines decode; a pause is for the swap only.

    Engines with equal layouts pass slices on, bucket by bucket; all of them cost the trainer one copy:

    trainer ranks ---> engine 0 ---> engine 1 ---> ...

    Where that fails, the engines behind get theirs from the trainer ranks after all.
    """

    def __init__(
        self, trainers: TrainerRanks, timeout_s: float, mixed: set[str], relay_host: str | None
    ) -> None:
        """`relay_host`: this process's address as engines reach it; None: no engine passes slices on."""
        super().__init__(trainers, timeout_s, mixed)
        self._relay_host = relay_host

    async def run(self, version: int, engines: Sequence[Updated]) -> list[EngineSyncResult]:
        results = await self._move(version, self._chains(engines))
        behind = [e for e in engines if _was_left_behind(results[e.url])]
        if behind:
            for e in behind:
                _log.warning(
                    "trainer ranks send version %d after all: %s", version, results[e.url].error
                )
            results |= await self._move(version, [[e] for e in behind])
        return [results[e.url] for e in engines]

    def _chains(self, engines: Sequence[Updated]) -> list[list[Updated]]:
        if self._relay_host is None:
            return [[e] for e in engines]
        alike: dict[str, list[Updated]] = defaultdict(list)
        for e in engines:
            alike[e.engine.digest].append(e)
        return list(alike.values())

    async def _move(
        self, version: int, chains: Sequence[Sequence[Updated]]
    ) -> dict[str, EngineSyncResult]:
        """Each engine's verdict; those that got the version have swapped it in."""
        deadline_s = time.monotonic() + self._timeout_s + GRACE_S
        sending = self._start_send(version, [chain[0].url for chain in chains])
        following = (self._follow(version, chain, sending, deadline_s) for chain in chains)
        received = [reports for chain in await asyncio.gather(*following) for reports in chain]
        sent = await _outcome(sending)
        results = []
        for chain in chains:
            for before, e in zip([None, *chain], chain, strict=False):
                result = self._judge(e.url, received.pop(0), sent if before is None else ())
                results.append(replace(result, upstream=before and before.url))
        flat = [e for chain in chains for e in chain]
        swaps = (self._swap(e, version, r, deadline_s) for e, r in zip(flat, results, strict=True))
        return {result.url: result for result in await asyncio.gather(*swaps)}

    async def _follow(
        self,
        version: int,
        chain: Sequence[Updated],
        sending: "asyncio.Future[Any]",
        deadline_s: float,
    ) -> list[list[Report]]:
        """What the ranks of each engine of a chain said."""
        relays = [
            before.engine.relay_to(e.engine, str(self._relay_host)) for before, e in pairwise(chain)
        ]
        links = [None, *(relay.link for relay in relays), None]

        async def follow(i: int) -> list[Report]:
            order = Order(version, links[i], links[i + 1])
            if i == 0:
                has_failed = partial(_has_failed, sending, chain[0].url)
            else:
                has_failed = partial(_is_broken, relays[i - 1])
            reports = await chain[i].engine.order(order, has_failed, deadline_s)
            error = agreement(reports)
            if error is not None:
                for relay in relays[max(0, i - 1) : i + 1]:
                    relay.store.fail(error)
                for e in chain[max(0, i - 1) : i + 1]:
                    e.engine.relay = None
            return reports

        return await asyncio.gather(*map(follow, range(len(chain))))

    async def _swap(
        self, updated: Updated, version: int, result: EngineSyncResult, deadline_s: float
    ) -> EngineSyncResult:
        """Put the staged weights to use, between two decode steps."""
        if result.error is not None:
            return result
        engine, control = updated.engine, updated.control
        began_s = time.monotonic()
        left_s = max(_SWAP_S, deadline_s - began_s)
        try:
            async with asyncio.timeout(left_s):
                try:
                    await self._open(control)
                    self._mixed.add(control.url)
                    await engine.command(control, "swap", version)
                    error = agreement(await engine.reports_by("swap", began_s + left_s))
                except EngineUpdateError as failure:
                    error = str(failure)
                return await self._close(updated, version, replace(result, error=error), began_s)
        except TimeoutError:
            error = f"engine {control.url} did not swap in version {version} within {left_s:.0f} s"
            return replace(result, error=error, pause_seconds=time.monotonic() - began_s)


async def _outcome(sending: "asyncio.Future[Any]") -> Sent:
    (sent,) = await asyncio.gather(sending, return_exceptions=True)
    return sent


def _has_failed(sending: "asyncio.Future[Any]", engine: str) -> bool:
    """Whether the trainer ranks are done with `engine`, and not well."""
    if not sending.done():
        return False
    return sending.exception() is not None or any(ranks[engine].error for ranks in sending.result())


def _is_broken(relay: Relay) -> bool:
    return relay.store.failure() is not None


def _was_left_behind(result: EngineSyncResult) -> bool:
    """It lives, but did not get what another engine was to pass on."""
    return result.error is not None and result.upstream is not None and not result.silent


def _engine_error(answer: BaseException | None) -> str | None:
    """What an EngineUpdateError says; any other error is raised."""
    if answer is not None and not isinstance(answer, EngineUpdateError):
        raise answer
    return None if answer is None else str(answer)
