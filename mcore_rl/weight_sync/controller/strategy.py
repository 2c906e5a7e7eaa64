"""Defines what in-place and staged syncs share: they bring linked engines to a version.

A sync calls trainer ranks and engines and returns one result per engine.

Syncs weights in place: paused engines receive slices straight into their parameters.

pause -> begin -> trainers send | engine ranks receive -> all agree? -> end -> commit -> resume
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mcore_rl.weight_sync.controller.engine_control import EngineCallError, EngineControl
from mcore_rl.weight_sync.controller.linked_engine import LinkedEngine
from mcore_rl.weight_sync.controller.sync_report import EngineSyncResult, root_error, summarize
from mcore_rl.weight_sync.wire import Link, Report

GRACE_S = 10.0
"""How much longer than the ranks' own deadline the controller waits for their answers."""


class TrainerRanks(Protocol):
    """All trainer ranks at once; each runs the method of the same name on its WeightSender."""

    @property
    def world_size(self) -> int: ...

    async def describe(self) -> Sequence[bytes]:
        """Return each rank's facts, in rank order."""
        ...

    async def plan_links(self, offers: Sequence[tuple[Link, bytes]]) -> Sequence[Sequence[bytes]]:
        """Return for each rank what it publishes of each link."""
        ...

    async def open_links(
        self, verdicts: Sequence[tuple[str, str]]
    ) -> Sequence[Sequence[str | Report]]:
        """Return for each rank and each link what WeightSender.open_links returns."""
        ...

    async def send(
        self, version: int, engines: Sequence[str], timeout_s: float
    ) -> Sequence[Mapping[str, Report]]:
        """Return engine -> report for each rank, in rank order."""
        ...


SendOutcome = Sequence[Mapping[str, Report]] | BaseException
"""The answer of TrainerRanks.send, or its error."""


@dataclass(frozen=True)
class SyncTarget:
    """An engine of the current sync, and its HTTP API."""

    engine: LinkedEngine
    control: EngineControl

    @property
    def url(self) -> str:
        return self.control.url


class SyncStrategy(ABC):
    """Moves a version to engines."""

    def __init__(
        self, trainers: TrainerRanks, timeout_s: float, mixed: set[str], verify_every: int = 0
    ) -> None:
        """Set what all syncs have in common.

        mixed         kept up to date: urls of paused engines whose parameters may mix versions
        verify_every  as LinkedEngine.is_to_verify
        """
        self._trainers = trainers
        self._timeout_s = timeout_s
        self._mixed = mixed
        self._verify_every = verify_every

    @abstractmethod
    async def run(self, version: int, targets: Sequence[SyncTarget]) -> list[EngineSyncResult]:
        """Bring `targets` to the trainer's current weights; return their results, in order."""

    def _is_to_verify(self, target: SyncTarget) -> bool:
        return target.engine.is_to_verify(self._verify_every)

    async def _open(self, control: EngineControl) -> None:
        await control.pause()
        await control.begin_update()

    async def _close(
        self, target: SyncTarget, version: int, result: EngineSyncResult, began_s: float
    ) -> EngineSyncResult:
        """End the update; commit and resume if `result` has no error, else leave the engine paused.

        `began_s` is the time.monotonic() before the pause.
        """
        control = target.control
        error = result.error
        verified = False
        try:
            if error is None:
                await asyncio.gather(control.end_update(), control.commit(version))
                await control.resume()
                target.engine.served_version = version
                verified = self._is_to_verify(target)
                target.engine.num_syncs += 1
                self._mixed.discard(control.url)
            else:
                await control.end_update()
        except EngineCallError as failure:
            error = error or str(failure)
        pause_seconds = time.monotonic() - began_s
        return replace(result, error=error, verified=verified, pause_seconds=pause_seconds)

    def _start_send(self, version: int, urls: Sequence[str]) -> "asyncio.Future[Any]":
        sending = self._trainers.send(version, urls, self._timeout_s)
        return asyncio.ensure_future(asyncio.wait_for(sending, self._timeout_s + GRACE_S))

    def _judge(
        self,
        url: str,
        received: Sequence[Report],
        sent: SendOutcome,
        answer: BaseException | None = None,
    ) -> EngineSyncResult:
        """Return the result of the transfer to one engine.

        received  its ranks' reports
        sent      the outcome of the trainer ranks; empty if they did not send to this engine
        answer    the engine's own error, if any
        """
        send_failed = isinstance(sent, BaseException)
        sender_reports = [] if send_failed else [by_engine[url] for by_engine in sent]
        error = root_error([*sender_reports, *received], answer)
        if send_failed:
            reason = str(sent) or f"no answer within {self._timeout_s + GRACE_S:.0f} s"
            error = f"the trainer ranks failed: {reason}" + (f"; {error}" if error else "")
        return summarize(url, received, error)


async def send_outcome(sending: "asyncio.Future[Any]") -> SendOutcome:
    (sent,) = await asyncio.gather(sending, return_exceptions=True)
    return sent


class InPlaceSync(SyncStrategy):
    """Pauses engines for the whole transfer, which needs no memory but the buckets in flight."""

    async def run(self, version: int, targets: Sequence[SyncTarget]) -> list[EngineSyncResult]:
        began_s = time.monotonic()
        answers = await asyncio.gather(
            *(self._open(target.control) for target in targets), return_exceptions=True
        )
        results: dict[str, EngineSyncResult] = {}
        opened = []
        for target, answer in zip(targets, answers, strict=True):
            error = _call_error(answer)
            if error is None:
                opened.append(target)
            else:
                results[target.url] = EngineSyncResult(target.url, error=error)
        if opened:
            for result in await self._move(version, opened):
                results[result.url] = result
        closing = (self._close(target, version, results[target.url], began_s) for target in targets)
        return await asyncio.gather(*closing)

    async def _move(self, version: int, targets: Sequence[SyncTarget]) -> list[EngineSyncResult]:
        """Transfer `version` to engines that are paused."""
        sending = self._start_send(version, [target.url for target in targets])
        self._mixed |= {target.url for target in targets}
        commands = (
            target.engine.command(
                target.control, "receive", version, verify=self._is_to_verify(target)
            )
            for target in targets
        )
        answers = await asyncio.gather(*commands, return_exceptions=True)
        received = [target.engine.take_reports("receive") for target in targets]
        sent = await send_outcome(sending)
        return [
            self._judge(target.url, reports, sent, answer)
            for target, reports, answer in zip(targets, received, answers, strict=True)
        ]


def _call_error(answer: BaseException | None) -> str | None:
    """Return the message of an EngineCallError; any other error is raised."""
    if answer is None:
        return None
    if not isinstance(answer, EngineCallError):
        raise answer
    return str(answer)
