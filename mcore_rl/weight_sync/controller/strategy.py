"""Brings linked engines to a version, in place or staged; returns one result per engine.

in place   pause -> begin -> trainers send | engine ranks receive -> all agree? -> end -> commit
           -> resume
staged     trainers send | engine ranks receive -> all agree? -> pause -> begin -> swap -> end
           -> commit -> resume

In place, paused engines receive slices straight into their parameters. Staged, engines receive
slices while they decode, and pause only to swap. Then engines of equal layouts form a chain: each
engine forwards slices to the next one, bucket by bucket. The trainer ranks send one copy to the
whole chain:

trainer ranks ---> engine 0 (relay) ---> engine 1 (relay) ---> ... ---> engine n

If a relay fails, the trainer ranks send to the engines behind it themselves.
"""

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

from mcore_rl.weight_sync.controller.engine_control import EngineCallError, EngineControl
from mcore_rl.weight_sync.controller.linked_engine import LinkedEngine, RelayLink
from mcore_rl.weight_sync.controller.sync_report import EngineSyncResult, find_root_error, summarize
from mcore_rl.weight_sync.wire import Link, Report, StageRequest
from mcore_rl.weights.lora.places import Content

GRACE_S = 10.0
"""How much longer the controller waits for the ranks' answers than the ranks' own deadline."""


class TrainerRanks(Protocol):
    """All trainer ranks at once; each runs the method of the same name on its WeightSender."""

    @property
    def world_size(self) -> int: ...

    async def describe(self, content: Content = "weights") -> Sequence[bytes]:
        """Return each rank's facts for links with that content, in rank order."""
        ...

    async def plan_links(self, offers: Sequence[tuple[Link, bytes]]) -> Sequence[Sequence[bytes]]:
        """Return for each rank its encoded PlanAnswer for each link."""
        ...

    async def open_links(
        self, verdicts: Sequence[tuple[str, str]]
    ) -> Sequence[Sequence[str | Report]]:
        """Return for each rank the answers of WeightSender.open_links."""
        ...

    async def send(
        self, version: int, engines: Sequence[str], timeout_s: float
    ) -> Sequence[Mapping[str, Report]]:
        """Return for each rank, in rank order, engine -> report."""
        ...

    async def publish_sums(self, version: int, engines: Sequence[str]) -> object:
        """Return once each rank has published the checksums of its weights to `engines`."""
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
        """Keep the options that all syncs share.

        mixed         updated: urls of paused engines whose parameters may mix versions
        verify_every  as in LinkedEngine.is_to_verify
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

        received  reports of the engine's ranks
        sent      outcome of the trainer ranks; empty if they did not send to this engine
        answer    the engine's own error, if any
        """
        send_failed = isinstance(sent, BaseException)
        sender_reports = [] if send_failed else [by_engine[url] for by_engine in sent]
        error = find_root_error([*sender_reports, *received], answer)
        if send_failed:
            reason = str(sent) or f"no answer within {self._timeout_s + GRACE_S:.0f} s"
            error = f"the trainer ranks failed: {reason}" + (f"; {error}" if error else "")
        return summarize(url, received, error)


async def wait_sent(sending: "asyncio.Future[Any]") -> SendOutcome:
    (sent,) = await asyncio.gather(sending, return_exceptions=True)
    return sent


class InPlaceSync(SyncStrategy):
    """Pauses engines for the whole transfer, which needs memory only for buckets in flight."""

    async def run(self, version: int, targets: Sequence[SyncTarget]) -> list[EngineSyncResult]:
        began_s = time.monotonic()
        answers = await asyncio.gather(
            *(self._open(target.control) for target in targets), return_exceptions=True
        )
        results: dict[str, EngineSyncResult] = {}
        opened = []
        for target, answer in zip(targets, answers, strict=True):
            error = _read_call_error(answer)
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
        sent = await wait_sent(sending)
        return [
            self._judge(target.url, reports, sent, answer)
            for target, reports, answer in zip(targets, received, answers, strict=True)
        ]


def _read_call_error(answer: BaseException | None) -> str | None:
    """Return the message of an EngineCallError; raise any other error."""
    if answer is None:
        return None
    if not isinstance(answer, EngineCallError):
        raise answer
    return str(answer)


_log = logging.getLogger(__name__)

_SWAP_S = 5.0
"""The least time for a swap, however long the transfer took."""


class StagedSync(SyncStrategy):
    def __init__(
        self,
        trainers: TrainerRanks,
        timeout_s: float,
        mixed: set[str],
        relay_host: str | None,
        verify_every: int = 0,
    ) -> None:
        """`relay_host`: this process's address as engines reach it; None turns relays off."""
        super().__init__(trainers, timeout_s, mixed, verify_every)
        self._relay_host = relay_host

    async def run(self, version: int, targets: Sequence[SyncTarget]) -> list[EngineSyncResult]:
        results = await self._move(version, self._group_in_chains(targets))
        retried = [target for target in targets if _has_lost_relay(results[target.url])]
        if retried:
            for target in retried:
                _log.warning(
                    "trainer ranks send version %d, because a relay did not: %s",
                    version,
                    results[target.url].error,
                )
            results |= await self._move(version, [[target] for target in retried])
        return [results[target.url] for target in targets]

    def _group_in_chains(self, targets: Sequence[SyncTarget]) -> list[list[SyncTarget]]:
        """Group engines whose ranks get equal buckets; without relays, each engine is a chain."""
        if self._relay_host is None:
            return [[target] for target in targets]
        by_digest: dict[str, list[SyncTarget]] = defaultdict(list)
        for target in targets:
            by_digest[target.engine.digest].append(target)
        return list(by_digest.values())

    async def _move(
        self, version: int, chains: Sequence[Sequence[SyncTarget]]
    ) -> dict[str, EngineSyncResult]:
        """Send `version` down all chains and swap it in where it arrived; return url -> result."""
        deadline_s = time.monotonic() + self._timeout_s + GRACE_S
        sending = self._start_send(version, [chain[0].url for chain in chains])
        staging = (self._stage_chain(version, chain, sending, deadline_s) for chain in chains)
        received_by_chain = await asyncio.gather(*staging)
        sent = await wait_sent(sending)
        staged: list[tuple[SyncTarget, EngineSyncResult]] = []
        for chain, received in zip(chains, received_by_chain, strict=True):
            relay: SyncTarget | None = None
            for target, reports in zip(chain, received, strict=True):
                if relay is None:
                    result = self._judge(target.url, reports, sent)
                else:
                    result = replace(self._judge(target.url, reports, ()), relay=relay.url)
                staged.append((target, result))
                relay = target
        return await self._swap_all(version, staged, deadline_s)

    async def _swap_all(
        self,
        version: int,
        staged: Sequence[tuple[SyncTarget, EngineSyncResult]],
        deadline_s: float,
    ) -> dict[str, EngineSyncResult]:
        """Swap `version` in on all engines; return url -> result, with those that have errors."""
        swaps = (self._swap(target, version, result, deadline_s) for target, result in staged)
        return {result.url: result for result in await asyncio.gather(*swaps)}

    async def _stage_chain(
        self,
        version: int,
        chain: Sequence[SyncTarget],
        sending: "asyncio.Future[Any]",
        deadline_s: float,
    ) -> list[list[Report]]:
        """Have every engine of a chain stage `version`; return the reports of each one's ranks."""
        relays = [
            relay.engine.link_relay(target.engine, str(self._relay_host))
            for relay, target in pairwise(chain)
        ]

        async def stage(i: int) -> list[Report]:
            request = StageRequest(
                version,
                receive_link=relays[i - 1].link if i > 0 else None,
                forward_link=relays[i].link if i < len(relays) else None,
            )
            if i == 0:
                has_failed = partial(send_has_failed, sending, chain[0].url)
            else:
                has_failed = partial(_relay_has_failed, relays[i - 1])
            reports = await chain[i].engine.stage(request, has_failed, deadline_s)
            error = find_root_error(reports)
            if error is not None:
                # Both neighbors stop waiting, and no one uses either link again.
                for relay in relays[max(0, i - 1) : i + 1]:
                    relay.store.fail(error)
                for target in chain[max(0, i - 1) : i + 1]:
                    target.engine.relay_link = None
            return reports

        return await asyncio.gather(*map(stage, range(len(chain))))

    async def _swap(
        self, target: SyncTarget, version: int, result: EngineSyncResult, deadline_s: float
    ) -> EngineSyncResult:
        """Swap in the staged weights between two decode steps, unless `result` has an error."""
        if result.error is not None:
            return result
        control = target.control
        began_s = time.monotonic()
        left_s = max(_SWAP_S, deadline_s - began_s)
        try:
            async with asyncio.timeout(left_s):
                error = await self._try_swap(target, version, began_s + left_s)
                return await self._close(target, version, replace(result, error=error), began_s)
        except TimeoutError:
            error = f"engine {control.url} did not swap in version {version} within {left_s:.0f} s"
            return replace(result, error=error, pause_seconds=time.monotonic() - began_s)

    async def _try_swap(self, target: SyncTarget, version: int, deadline_s: float) -> str | None:
        """Return the error of the swap, or None."""
        try:
            await self._open(target.control)
            self._mixed.add(target.url)
            await self._command_swap(target, version)
            return find_root_error(await target.engine.wait_reports("swap", deadline_s))
        except EngineCallError as failure:
            return str(failure)

    async def _command_swap(self, target: SyncTarget, version: int) -> None:
        verify = self._is_to_verify(target)
        await target.engine.command(target.control, "swap", version, verify=verify)


def send_has_failed(sending: "asyncio.Future[Any]", engine: str) -> bool:
    """Return whether the trainer ranks are done and failed to send to `engine`."""
    if not sending.done():
        return False
    if sending.exception() is not None:
        return True
    return any(by_engine[engine].error for by_engine in sending.result())


def _relay_has_failed(relay: RelayLink) -> bool:
    return relay.store.failure() is not None


def _has_lost_relay(result: EngineSyncResult) -> bool:
    """Return whether the engine lives, but a relay failed to forward its slices."""
    return result.error is not None and result.relay is not None and not result.missing_reports
