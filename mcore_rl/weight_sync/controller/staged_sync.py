"""Syncs weights while engines decode: slices are staged, and engines pause only to swap them in.

trainers send | engine ranks receive -> all agree? -> pause -> begin -> swap -> end -> commit ->
resume

Engines of equal layouts form a chain: each forwards slices to the next, bucket by bucket. The
trainer ranks send one copy to the whole chain:

trainer ranks ---> engine 0 (relay) ---> engine 1 (relay) ---> ... ---> engine n

If a relay fails, the trainer ranks send to the engines behind it themselves.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from mcore_rl.weight_sync.controller.engine_control import EngineCallError
from mcore_rl.weight_sync.controller.linked_engine import RelayLink
from mcore_rl.weight_sync.controller.strategy import (
    GRACE_S,
    SyncStrategy,
    SyncTarget,
    TrainerRanks,
    send_outcome,
)
from mcore_rl.weight_sync.controller.sync_report import EngineSyncResult, root_error
from mcore_rl.weight_sync.wire import Report, StageRequest

_log = logging.getLogger(__name__)

_SWAP_S = 5.0
"""The least time a swap gets, however long the transfer took."""


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
        results = await self._move(version, self._chains(targets))
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

    def _chains(self, targets: Sequence[SyncTarget]) -> list[list[SyncTarget]]:
        """Group engines whose ranks get equal buckets; without relays, each is a chain alone."""
        if self._relay_host is None:
            return [[target] for target in targets]
        by_digest: dict[str, list[SyncTarget]] = defaultdict(list)
        for target in targets:
            by_digest[target.engine.digest].append(target)
        return list(by_digest.values())

    async def _move(
        self, version: int, chains: Sequence[Sequence[SyncTarget]]
    ) -> dict[str, EngineSyncResult]:
        """Move `version` down all chains and swap it in where it arrived; return url -> result."""
        deadline_s = time.monotonic() + self._timeout_s + GRACE_S
        sending = self._start_send(version, [chain[0].url for chain in chains])
        staging = (self._stage_chain(version, chain, sending, deadline_s) for chain in chains)
        received_by_chain = await asyncio.gather(*staging)
        sent = await send_outcome(sending)
        swaps = []
        for chain, received in zip(chains, received_by_chain, strict=True):
            relay: SyncTarget | None = None
            for target, reports in zip(chain, received, strict=True):
                if relay is None:
                    result = self._judge(target.url, reports, sent)
                else:
                    result = replace(self._judge(target.url, reports, ()), relay=relay.url)
                swaps.append(self._swap(target, version, result, deadline_s))
                relay = target
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
            relay.engine.relay_link_to(target.engine, str(self._relay_host))
            for relay, target in pairwise(chain)
        ]

        async def stage(i: int) -> list[Report]:
            request = StageRequest(
                version,
                receive_link=relays[i - 1].link if i > 0 else None,
                forward_link=relays[i].link if i < len(relays) else None,
            )
            if i == 0:
                has_failed = partial(_send_has_failed, sending, chain[0].url)
            else:
                has_failed = partial(_relay_has_failed, relays[i - 1])
            reports = await chain[i].engine.stage(request, has_failed, deadline_s)
            error = root_error(reports)
            if error is not None:
                # Both neighbors stop waiting, and neither link is used again.
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
            verify = self._is_to_verify(target)
            await target.engine.command(target.control, "swap", version, verify=verify)
            return root_error(await target.engine.wait_reports("swap", deadline_s))
        except EngineCallError as failure:
            return str(failure)


def _send_has_failed(sending: "asyncio.Future[Any]", engine: str) -> bool:
    """Return whether the trainer ranks are done and failed to send to `engine`."""
    if not sending.done():
        return False
    if sending.exception() is not None:
        return True
    return any(by_engine[engine].error for by_engine in sending.result())


def _relay_has_failed(relay: RelayLink) -> bool:
    return relay.store.failure() is not None


def _has_lost_relay(result: EngineSyncResult) -> bool:
    """Return whether the engine lives, but did not get what a relay was to forward."""
    return result.error is not None and result.relay is not None and not result.missing_reports
