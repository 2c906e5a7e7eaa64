"""Weights to engines and requests to those that hold them; engines that were lost are linked anew."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from mcore_rl.players.canary import Canary, CanaryReport
from mcore_rl.players.colocation import SharedGpus
from mcore_rl.roles import Watched
from mcore_rl.rollout.engine_health import EngineHealth, EngineState
from mcore_rl.stream.controller.sync import SyncController, SyncError
from mcore_rl.stream.controller.sync_report import SyncReport
from mcore_rl.types import TrainBatch, WeightVersion

RESTART_POLL_S = 0.5
DEATH_SHOWS_S = 3.0
"""How long after its connections a server's end may show."""
_log = logging.getLogger(__name__)


class EngineSync:
    """Keeps the engines on the trainer's weights, and requests on the engines that hold them.

    An engine that was started again, or whose last sync failed, is linked anew by the first sync that finds
    it healthy; a sync waits for one only when there is no other.
    """

    def __init__(
        self,
        sync_controller: SyncController,
        canary: Canary,
        rotation: EngineHealth,
        look: Callable[[], Awaitable[None]],
        watched: Watched[Any],
        memory: SharedGpus,
    ) -> None:
        """`look` brings `rotation` up to date; it raises if an engine died for good."""
        self._sync_controller, self._canary, self._rotation = sync_controller, canary, rotation
        self._look, self._watched, self._memory = look, watched, memory
        self._linked: dict[str, int] = {}
        """Engine url -> `restarts` of the process that was linked, also if it then failed."""
        self._version = WeightVersion(0)

    def sync(self, version: WeightVersion, probe: TrainBatch | None = None) -> Mapping[str, float]:
        """SyncError if no engine has the weights, or none of those that say so computes with them."""
        while True:
            report, reasons = self._watched(self._bring(version))
            urls = self._holding()
            checked = CanaryReport() if probe is None else self._canary.check(version, probe, urls)
            self._memory.hand_to_engines()
            serving = [url for url in urls if url not in checked.failed]
            if serving:
                self._rotation.set_serving(serving, {**reasons, **checked.failed})
                num_failed = float(len(self._rotation.lives) - len(serving))
                return {**report.metrics(), **checked.metrics(), "sync/engines_failed": num_failed}
            if not self._watched(self._is_any_coming()):
                raise SyncError("; ".join(checked.failed.values()))

    async def revive(self) -> bool:
        """If no engine serves but one starts again, wait for it and bring it to the current version."""
        if not await self._is_any_coming() or self._rotation.serving:
            return False
        _, reasons = await self._bring(self._version)
        await self._memory.for_rollout()
        self._rotation.set_serving(self._holding(), reasons)
        return bool(self._rotation.serving)

    async def _bring(self, version: WeightVersion) -> tuple[SyncReport, dict[str, str]]:
        """What came of the sync, and by url why engines were left out or failed."""
        self._version = version
        await self._memory.for_sync()
        while True:
            reasons = await self._link()
            try:
                report = await self._sync_controller.sync(version, self._in_link())
            except SyncError as error:
                if not await self._is_any_coming():
                    raise
                _log.warning("%s; waiting for an engine that is starting again", error)
            else:
                return report, {**reasons, **report.failed}

    async def _link(self) -> dict[str, str]:
        """Link what is healthy and not linked until there is an engine to sync; why others could not be."""
        reasons: dict[str, str] = {}
        while True:
            await self._look()
            for life in self._rotation.lives:
                out_of_link = (
                    life.url not in self._sync_controller.linked and life.url not in reasons
                )
                if life.healthy and (out_of_link or self._is_new(life)):
                    reasons |= await self._link_one(life)
            if self._in_link():
                return reasons
            if not await self._is_any_coming():
                raise SyncError("; ".join(reasons.values()))
            await asyncio.sleep(RESTART_POLL_S)

    async def _link_one(self, life: EngineState) -> dict[str, str]:
        self._linked[life.url] = life.restarts
        try:
            await self._sync_controller.connect([life.url])
        except SyncError as error:
            return {life.url: str(error)}
        return {}

    def _in_link(self) -> list[str]:
        """Urls of the engines whose present process is linked."""
        lives = {life.url: life for life in self._rotation.lives}
        return [url for url in self._sync_controller.linked if not self._is_new(lives[url])]

    def _holding(self) -> list[str]:
        """Urls of the engines whose present process holds the newest version."""
        return [url for url in self._in_link() if url in self._sync_controller.in_rotation]

    def _is_new(self, life: EngineState) -> bool:
        return self._linked.get(life.url) != life.restarts

    def _coming(self) -> bool:
        return any(self._is_new(life) for life in self._rotation.lives)

    async def _is_any_coming(self) -> bool:
        """Whether an engine starts again."""
        until = time.monotonic() + DEATH_SHOWS_S
        while not self._coming() and time.monotonic() < until:
            await asyncio.sleep(RESTART_POLL_S)
            await self._look()
        return self._coming()
