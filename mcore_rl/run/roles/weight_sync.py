"""Syncs the trainer's weights to the engines, checks the engines, and relinks lost ones.

One sync: the trainer scores a few sequences -> new engines are linked -> weights are sent ->
engines score the same sequences -> requests go to the engines that agree.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from mcore_rl.logs.progress import tell_stage
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
"""How long a server's death may take to show after its connections fail."""
MOST_SAME = 8
"""After so many syncs in a row with unchanged bytes, a run that trains ends."""
_log = logging.getLogger(__name__)


class WeightLinks(Protocol):
    """The links from trainer ranks to engines; see weight_sync.controller.sync.SyncController."""

    @property
    def linked(self) -> tuple[str, ...]: ...

    @property
    def in_rotation(self) -> tuple[str, ...]: ...

    async def connect(self, urls: Sequence[str]) -> None: ...

    def forget_links(self) -> None: ...

    def unlink(self, url: str) -> None: ...

    async def sync(self, version: int, urls: Sequence[str] | None = None) -> SyncReport: ...


@dataclass(frozen=True)
class TakenWeights:
    """Weights that an engine took.

    num_steps   optimizer steps of the policy so far that should have changed weights
    num_same    syncs in a row that brought the same bytes in spite of such steps
    """

    version: int
    num_steps: int
    num_same: int = 0


class EngineSync:
    """Keeps engines on the trainer's weights; only engines with these weights get requests.

    An engine that was started again, or whose last sync failed, is linked by the first sync that
    finds it healthy. A sync waits for such an engine only if no other engine is left. At the start
    of a run, after each sync and after a restart, an engine gets no requests until the parity check
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
        """`look` brings `health` up to date, and raises if an engine died for good.

        count_steps   returns how many optimizer steps the policy has taken
        """
        self._links = links
        self._parity_check = parity_check
        self._health = health
        self._look = look
        self._watched = watched
        self._memory = memory
        self._linked: dict[str, int] = {}
        """Engine url -> `restarts` of the linked process, even if the process failed afterwards."""
        self._version = WeightVersion(0)
        self._count_steps = count_steps
        self._taken: dict[str, TakenWeights] = {}
        """Engine url -> the weights that the engine took in its last sync."""

    def sync(self, version: WeightVersion, probe: StoredBatch) -> Mapping[str, float]:
        """Bring the engines to `version` and compare their log-probs of `probe` with the trainer's.

        Returns metrics of the sync. Raises SyncError if no engine took the weights, or if no engine
        that took them agrees with the trainer.
        """
        self._memory.load(TRAINER, WEIGHTS_ONLY)
        self._parity_check.score_samples(version, probe)
        return self._sync(version)

    def sync_first(self, version: WeightVersion, probe: TrainBatch) -> Mapping[str, float]:
        """Sync before there are samples; `probe` is made by make_probe."""
        with tell_stage("start-up: first weight sync", is_told=True):
            self._memory.load(TRAINER, WEIGHTS_ONLY)
            self._parity_check.score_sequences(version, probe)
            return self._sync(version)

    def _sync(self, version: WeightVersion) -> Mapping[str, float]:
        while True:
            report, reasons = self._watched(self._bring(version))
            holding = self._list_up_to_date()
            checked = self._watched(self._parity_check.check(holding, report.verified))
            self._memory.prepare_rollout()
            serving = self._watched(self._admit(holding, reasons, checked))
            if serving:
                num_failed = float(self._count_failed(serving))
                return {**report.metrics(), **checked.metrics(), "sync/engines_failed": num_failed}
            self._watched(self._expect_another(checked))

    def _count_failed(self, serving: Sequence[str]) -> int:
        """Return how many engines lack the weights, without those that just came or are leaving."""
        joined = self._health.rotation.joined
        urls = {state.url for state in self._health.states} - self._health.draining
        return sum(url in self._linked or url not in joined for url in urls - set(serving))

    def forget_links(self) -> None:
        """Have the next sync link all engines anew, as the trainer's ranks are others."""
        self._links.forget_links()

    async def revive(self) -> bool:
        """If no engine serves, wait for an engine that is starting again, and sync it.

        Returns whether an engine serves again because of this call. Raises SyncError if no engine
        that returned agrees with the trainer.
        """
        if not await self._is_any_coming() or self._health.serving:
            return False
        await self._serve_again()
        return True

    async def prepare(self) -> None:
        """Sync engines that have no weights: ranks on their GPUs were replaced since the last sync.

        Raises SyncError as `revive` does.
        """
        if self._memory.lacks_engine_weights:
            await self._serve_again()

    async def _serve_again(self) -> None:
        """Bring engines the weights of the last sync until one serves."""
        while True:
            report, reasons = await self._bring(self._version)
            await self._memory.for_rollout()
            holding = self._list_up_to_date()
            checked = await self._parity_check.check(holding, report.verified)
            if await self._admit(holding, reasons, checked):
                return
            await self._expect_another(checked)

    async def _admit(
        self, holding: Sequence[str], reasons: Mapping[str, str], checked: ParityReport
    ) -> list[str]:
        """Return the engines in `holding` that passed the parity check, and send them requests."""
        serving = [url for url in holding if url not in checked.failed]
        if serving:
            self._health.set_serving(serving, {**reasons, **checked.failed}, self._version)
        return serving

    async def _expect_another(self, checked: ParityReport) -> None:
        """Raise SyncError unless an engine is starting again."""
        if not await self._is_any_coming():
            raise SyncError("; ".join(checked.failed.values()))

    async def _bring(self, version: WeightVersion) -> tuple[SyncReport, dict[str, str]]:
        """Send the weights; return the report, and url -> why an engine was left out or failed."""
        self._version = version
        while True:
            reasons = await self._link()
            try:
                with self._health.weight_sync():
                    report = await self._links.sync(version, self._in_link())
            except SyncError as error:
                if not await self._is_any_coming():
                    raise
                _log.warning("%s; waiting for an engine that is starting again", error)
            else:
                self._note_taken(report)
                return report, {**reasons, **report.failed}

    def _note_taken(self, report: SyncReport) -> None:
        """Keep which weights engines took; warn if they are unchanged although the policy trained.

        Raises SyncError after MOST_SAME such syncs in a row.
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
        """Link healthy engines until there is one to sync; return why others failed.

        Lost engines on shared GPUs are started again before.
        """
        reasons: dict[str, str] = {}
        while True:
            await self._look()
            await self._memory.for_sync()
            self._forget_left()
            due = [state for state in self._health.states if self._is_due(state, reasons)]
            reasons |= await self._link_all(due)
            if self._in_link():
                return reasons
            if not await self._is_any_coming():
                raise SyncError("; ".join(reasons.values()))
            await asyncio.sleep(RESTART_POLL_S)

    def _forget_left(self) -> None:
        """Drop the links to engines that have left; one may come back at an old address."""
        for url in self._health.take_left():
            self._links.unlink(url)
            self._linked.pop(url, None)
            self._taken.pop(url, None)

    def _is_due(self, state: EngineState, reasons: Mapping[str, str]) -> bool:
        """Return whether to link the engine: it is healthy, not linked, and has not failed yet.

        reasons   url of each engine that failed in this sync -> why
        """
        is_unlinked = state.url not in self._links.linked and state.url not in reasons
        return state.healthy and (is_unlinked or self._is_new(state))

    async def _link_all(self, states: Sequence[EngineState]) -> Mapping[str, str]:
        """Link engines at the same time; return url -> why an engine could not be linked."""
        if not states:
            return {}
        self._linked |= {state.url: state.restarts for state in states}
        try:
            await self._links.connect([state.url for state in states])
        except SyncError as error:
            return error.failed
        return {}

    def _in_link(self) -> list[str]:
        """Return the urls of engines whose current process is linked."""
        states = {state.url: state for state in self._health.states}
        linked = ((url, states[url]) for url in self._links.linked if url in states)
        return [url for url, state in linked if not self._is_new(state) and not state.lost]

    def _list_up_to_date(self) -> list[str]:
        """Return the urls of engines whose current process has the newest version."""
        return [url for url in self._in_link() if url in self._links.in_rotation]

    def _is_new(self, state: EngineState) -> bool:
        """Return whether the engine's current process was never linked."""
        return self._linked.get(state.url) != state.restarts

    def _has_coming(self) -> bool:
        """Return whether an engine is starting again, on its node or on another one."""
        states = self._health.states
        is_new = any(self._is_new(state) and not state.lost for state in states)
        return is_new or self._health.num_coming > 0

    async def _is_any_coming(self) -> bool:
        """Return whether an engine is starting again, within DEATH_SHOWS_S."""
        deadline = now_s() + DEATH_SHOWS_S
        while not self._has_coming() and now_s() < deadline:
            await asyncio.sleep(RESTART_POLL_S)
            await self._look()
        return self._has_coming()


def take_weights(
    report: SyncReport, taken: Mapping[str, TakenWeights], now: TakenWeights
) -> dict[str, TakenWeights]:
    """Return engine url -> the weights that the engine took.

    Warns of engines that got unchanged bytes although the policy took optimizer steps. Without a
    step, as while the critic warms up or when a version is sent again, the bytes stay the same.

    taken   engine url -> the weights that the engine took in the sync before
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
