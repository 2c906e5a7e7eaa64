"""Syncs weights in place: paused engines receive slices straight into their parameters.

pause -> begin -> trainers send | engine ranks receive -> all agree? -> end -> commit -> resume
"""

import asyncio
import time
from collections.abc import Sequence

from mcore_rl.weight_sync.controller.engine_control import EngineCallError
from mcore_rl.weight_sync.controller.strategy import SyncStrategy, SyncTarget, send_outcome
from mcore_rl.weight_sync.controller.sync_report import EngineSyncResult


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
