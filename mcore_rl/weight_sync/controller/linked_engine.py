"""One engine as the controller sees it: sends commands to it, and reads its ranks' reports."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from mcore_rl.weight_sync.controller.engine_control import EngineControl
from mcore_rl.weight_sync.link_store import LinkStore, make_report_key
from mcore_rl.weight_sync.wire import Action, Command, Link, Report, StageRequest, encode_command

_FAILURE_GRACE_S = 3.0
"""How long an engine's ranks may take to report once the transfer is known to have failed."""
VERIFIED_FIRST = 4
"""The first syncs of a link, which are always read back: each set of parameters twice, and as often
as the parity check needs to judge (run.roles.parity_tolerance.NUM_TO_JUDGE)."""
_FAILURE_POLL_S = 0.1
"""How often a wait for reports checks for failures; the last report wakes the wait."""


def is_read_back(num_syncs: int, every: int) -> bool:
    """Return whether the sync after `num_syncs` syncs of a link is read back.

    `every`: after the first syncs, every so many are read back; 0: none are.
    """
    return every > 0 and (num_syncs < VERIFIED_FIRST or num_syncs % every == 0)


@dataclass(frozen=True)
class RelayLink:
    """The link over which an engine forwards slices to `engine`; this object owns its store."""

    engine: "LinkedEngine"
    link: Link
    store: LinkStore


@dataclass
class LinkedEngine:
    """An engine and its link to the trainer ranks, whose store lives as long as this object.

    digest               of the plan on which engine ranks and trainer ranks agreed
    served_version       the version last committed on the engine
    num_stage_requests   stage requests put into the store so far
    num_syncs            committed versions that came over the link
    relay_link           the link to the engine to which this engine forwarded last
    factors              links of low-rank factors by the adapter's name in the engine, once it
                         has a version of each; that of factors that it merges has the name ""
    """

    link: Link
    store: LinkStore
    tp_size: int
    digest: str = ""
    served_version: int | None = None
    num_stage_requests: int = 0
    num_syncs: int = 0
    relay_link: RelayLink | None = None
    factors: "dict[str, LinkedEngine]" = field(default_factory=dict)

    def is_to_verify(self, every: int) -> bool:
        """Return whether to read the next sync back from the parameters; see is_read_back."""
        return is_read_back(self.num_syncs, every)

    async def command(
        self,
        control: EngineControl,
        action: Action,
        version: int | None = None,
        *,
        verify: bool = False,
        adapters: tuple[str, ...] = (),
        weights: bool = True,
    ) -> None:
        """Have SGLang call the receiver in every rank; return when all ranks are done.

        adapters, weights   as in Command
        """
        command = Command(self.link, action, version, verify, adapters, weights)
        # Each version of an adapter has prefixes of its own in the cache.
        flush_cache = weights and action != "connect"
        await control.run_loader(encode_command(command), self.tp_size, flush_cache=flush_cache)

    def take_reports(self, action: Action) -> list[Report]:
        """Take the ranks' reports out of the store; a rank without one counts as failed."""
        return [
            self.store.take_report(action, rank) or self._make_missing_report(rank)
            for rank in self._ranks
        ]

    async def wait_reports(self, action: Action, deadline_s: float) -> list[Report]:
        """Return the ranks' reports once all have come, at the latest at `deadline_s`.

        A rank without a report at time.monotonic() `deadline_s` counts as failed. A pipeline stage
        executes a command some time after the engine has answered the command.
        """
        return await self._wait_reports(action, lambda: False, deadline_s)

    async def stage(
        self, request: StageRequest, has_failed: Callable[[], bool], deadline_s: float
    ) -> list[Report]:
        """Have the ranks receive a version while they decode; return their reports.

        A rank counts as failed if it has not reported when time.monotonic() passes `deadline_s`, or
        a few seconds after another rank or the sending side (`has_failed`) failed.
        """
        self.store.put_stage_request(self.num_stage_requests, request)
        reports = await self._wait_reports("receive", has_failed, deadline_s)
        self.store.drop_stage_request(self.num_stage_requests)
        self.num_stage_requests += 1
        return reports

    def link_relay(self, engine: "LinkedEngine", host: str) -> RelayLink:
        """Return the link to an engine of equal layouts: the last sync's, or one on `host`."""
        if self.relay_link is None or self.relay_link.engine is not engine:
            store = LinkStore.serve(host, self.link.timeout_s)
            link = replace(
                engine.link,
                store_host=host,
                store_port=store.port,
                store_key=store.key,
                num_senders=self.link.num_receivers,
                layouts="",
                relay=self.link.engine,
            )
            store.keep(link)
            self.relay_link = RelayLink(engine, link, store)
        return self.relay_link

    async def _wait_reports(
        self, action: Action, has_failed: Callable[[], bool], deadline_s: float
    ) -> list[Report]:
        keys = [make_report_key(action, rank) for rank in self._ranks]
        is_failing = False
        while True:
            left_s = deadline_s - time.monotonic()
            if await self.store.wait_present(keys, min(left_s, _FAILURE_POLL_S)):
                break
            if left_s <= 0:
                break
            if not is_failing and (has_failed() or self.store.has_error(action, self._ranks)):
                is_failing = True
                deadline_s = min(deadline_s, time.monotonic() + _FAILURE_GRACE_S)
        return self.take_reports(action)

    @property
    def _ranks(self) -> range:
        """The engine's ranks, numbered over the link."""
        return range(self.link.num_senders, self.link.num_ranks)

    def _make_missing_report(self, rank: int) -> Report:
        error = "did not report (see the engine's log)"
        return Report(self.link.name_rank(rank), error=error, peer_lost=True, missing=True)
