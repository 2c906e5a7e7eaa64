"""Brings the trainer's weights to the engines that serve them, and links lost engines again.

The order of one sync: the trainer scores a few sequences -> link new engines -> send weights ->
engines score the same sequences -> requests go to the engines that agree.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from mcore_rl.loops.roles import Watched
from mcore_rl.process.clock import now_s
from mcore_rl.rollout.engine_health import EngineHealth, EngineState
from mcore_rl.run.roles.colocation import TRAINER, WEIGHTS_ONLY, SharedGpus
from mcore_rl.run.roles.parity_check import ParityCheck, ParityReport
from mcore_rl.types import StoredBatch, TrainBatch, WeightVersion
from mcore_rl.weight_sync.controller.sync import SyncError
from mcore_rl.weight_sync.controller.sync_report import SyncReport

RESTART_POLL_S = 0.5
DEATH_SHOWS_S = 3.0
"""How long after its connections fail a server's death may take to show."""
MOST_SAME = 8
"""So many syncs in a row that bring an engine the bytes that it had end a run that trains."""
_log = logging.getLogger(__name__)


class WeightLinks(Protocol):
    """The links from trainer ranks to engines; see weight_sync.controller.sync.SyncController."""

    @property
    def linked(self) -> tuple[str, ...]: ...

    @property
    def in_rotation(self) -> tuple[str, ...]: ...

    async def connect(self, urls: Sequence[str]) -> None: ...

    async def sync(self, version: int, urls: Sequence[str] | None = None) -> SyncReport: ...


@dataclass(frozen=True)
class TakenWeights:
    """Weights that an engine took.

    num_steps   the policy's optimizer steps until then, of those that should change weights
    num_same    syncs in a row until then that brought the same bytes although there were such steps
    """

    version: int
    num_steps: int
    num_same: int = 0


class EngineSync:
    """Keeps the engines on the trainer's weights, and requests on the engines that hold them.

    An engine that was started again, or whose last sync failed, is linked by the first sync that
    finds it healthy. A sync waits for such an engine only when there is no other. At the start
    of a run, after a sync and after its return, an engine gets no requests until the parity check
    finds that it agrees with the trainer.
    """

    def __init__(
        self,
        links: WeightLinks,
        parity_check: ParityCheck,
        health: EngineHealth,
        look: Callable[[], Awaitable[None]],
        watched: Watched,
        memory: SharedGpus,
        count_steps: Callable[[], int],
    ) -> None:
        """`look` brings `health` up to date; it raises if an engine died for good.

        count_steps   returns how many optimizer steps the policy has taken
        """
        self._links = links
        self._parity_check = parity_check
        self._health = health
        self._look = look
        self._watched = watched
        self._memory = memory
        self._linked: dict[str, int] = {}
        """Engine url -> `restarts` of the process that was linked, also if it failed afterwards."""
        self._version = WeightVersion(0)
        self._count_steps = count_steps
        self._taken: dict[str, TakenWeights] = {}
        """Engine url -> what it took in its last sync."""

    def sync(self, version: WeightVersion, probe: StoredBatch) -> Mapping[str, float]:
        """Bring the engines to `version` and compare their log-probs of `probe` with the trainer's.

        Returns metrics of the sync. Raises SyncError if no engine took the weights, or none of
        those that did agrees with the trainer.
        """
        self._memory.load(TRAINER, WEIGHTS_ONLY)
        self._parity_check.score_samples(version, probe)
        return self._sync(version)

    def sync_first(self, version: WeightVersion, probe: TrainBatch) -> Mapping[str, float]:
        """Do as `sync` before there are samples, with sequences of make_probe."""
        self._memory.load(TRAINER, WEIGHTS_ONLY)
        self._parity_check.score_sequences(version, probe)
        return self._sync(version)

    def _sync(self, version: WeightVersion) -> Mapping[str, float]:
        while True:
            report, reasons = self._watched(self._bring(version))
            holding = self._list_up_to_date()
            checked = self._watched(self._parity_check.check(holding, report.verified))
            self._memory.prepare_rollout()
            serving = self._admit(holding, reasons, checked)
            if serving:
                num_failed = float(len(self._health.states) - len(serving))
                return {**report.metrics(), **checked.metrics(), "sync/engines_failed": num_failed}
            self._watched(self._expect_another(checked))

    async def revive(self) -> bool:
        """If no engine serves but one is starting again, wait for it and bring it the current
        weights.

        Returns whether an engine serves again because of this call. Raises SyncError if none of the
        engines that returned agrees with the trainer.
        """
        if not await self._is_any_coming() or self._health.serving:
            return False
        while True:
            report, reasons = await self._bring(self._version)
            await self._memory.for_rollout()
            holding = self._list_up_to_date()
            checked = await self._parity_check.check(holding, report.verified)
            if self._admit(holding, reasons, checked):
                return True
            await self._expect_another(checked)

    def _admit(
        self, holding: Sequence[str], reasons: Mapping[str, str], checked: ParityReport
    ) -> list[str]:
        """Send requests to the engines in `holding` that passed the parity check, if any; return
        these engines.
        """
        serving = [url for url in holding if url not in checked.failed]
        if serving:
            self._health.set_serving(serving, {**reasons, **checked.failed}, self._version)
        return serving

    async def _expect_another(self, checked: ParityReport) -> None:
        """Return if an engine is starting again; raise SyncError if none is."""
        if not await self._is_any_coming():
            raise SyncError("; ".join(checked.failed.values()))

    async def _bring(self, version: WeightVersion) -> tuple[SyncReport, dict[str, str]]:
        """Return the report of the sync, and why engines were left out or failed, by url."""
        self._version = version
        await self._memory.for_sync()
        while True:
            reasons = await self._link()
            try:
                report = await self._links.sync(version, self._in_link())
            except SyncError as error:
                if not await self._is_any_coming():
                    raise
                _log.warning("%s; waiting for an engine that is starting again", error)
            else:
                self._note_taken(report)
                return report, {**reasons, **report.failed}

    def _note_taken(self, report: SyncReport) -> None:
        """Note what engines took. Warn if the policy was trained but its weights are as before.

        Raises SyncError once that is so for MOST_SAME syncs in a row.
        """
        now = TakenWeights(report.version, self._count_steps())
        self._taken |= take_weights(report, self._taken, now)
        same = {url: taken.num_same for url, taken in self._taken.items() if taken.num_same}
        if same and max(same.values()) >= MOST_SAME:
            raise SyncError(
                f"version {report.version} is the {MOST_SAME}th in a row that brought engines bit"
                f" for bit the weights that they had ({', '.join(same)}; sync/changed_share=0),"
                " although the policy took optimizer steps with a gradient and a learning rate"
                " above 0: the trainer sends old weights, or its steps are too small to change any"
            )

    async def _link(self) -> dict[str, str]:
        """Link healthy engines until there is one to sync; return why others failed."""
        reasons: dict[str, str] = {}
        while True:
            await self._look()
            due = [state for state in self._health.states if self._is_due(state, reasons)]
            reasons |= await self._link_all(due)
            if self._in_link():
                return reasons
            if not await self._is_any_coming():
                raise SyncError("; ".join(reasons.values()))
            await asyncio.sleep(RESTART_POLL_S)

    def _is_due(self, state: EngineState, reasons: Mapping[str, str]) -> bool:
        """Return whether the engine is healthy and not linked; `reasons` has those that failed."""
        is_unlinked = state.url not in self._links.linked and state.url not in reasons
        return state.healthy and (is_unlinked or self._is_new(state))

    async def _link_all(self, states: Sequence[EngineState]) -> Mapping[str, str]:
        """Link engines at once; return why some could not be linked, by url."""
        if not states:
            return {}
        self._linked |= {state.url: state.restarts for state in states}
        try:
            await self._links.connect([state.url for state in states])
        except SyncError as error:
            return error.failed
        return {}

    def _in_link(self) -> list[str]:
        """Urls of the engines whose present process is linked."""
        states = {state.url: state for state in self._health.states}
        linked = ((url, states[url]) for url in self._links.linked)
        return [url for url, state in linked if not self._is_new(state) and not state.lost]

    def _list_up_to_date(self) -> list[str]:
        """Urls of the engines whose present process holds the newest version."""
        return [url for url in self._in_link() if url in self._links.in_rotation]

    def _is_new(self, state: EngineState) -> bool:
        """Return whether the engine's present process was never linked."""
        return self._linked.get(state.url) != state.restarts

    def _has_new(self) -> bool:
        return any(self._is_new(state) for state in self._health.states)

    async def _is_any_coming(self) -> bool:
        """Return whether an engine is starting again, after giving a death time to show."""
        deadline = now_s() + DEATH_SHOWS_S
        while not self._has_new() and now_s() < deadline:
            await asyncio.sleep(RESTART_POLL_S)
            await self._look()
        return self._has_new()


def take_weights(
    report: SyncReport, taken: Mapping[str, TakenWeights], now: TakenWeights
) -> dict[str, TakenWeights]:
    """Return what the engines took, by url; warn of those that were brought the bytes they had
    although the policy took optimizer steps.

    Without a step, as while the critic warms up or when a version is sent again, the bytes have to
    be the same.

    taken   by engine url, what each took in the sync before
    """
    took = {}
    old_versions = {}
    for url in report.serving:
        before = taken.get(url)
        num_same = 0
        if before is not None and url in report.unchanged:
            is_trained = before.num_steps < now.num_steps
            num_same = before.num_same + is_trained
            if is_trained:
                old_versions[url] = before.version
        took[url] = replace(now, num_same=num_same)
    if old_versions:
        _log.warning(
            "version %d brought engines bit for bit the weights that they had (%s), although the"
            " policy took optimizer steps meanwhile (sync/changed_share=0): the trainer sends old"
            " weights, or its steps are too small to change any",
            report.version,
            ", ".join(f"{url}: version {version}" for url, version in old_versions.items()),
        )
    return took
