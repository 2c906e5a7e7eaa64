"""One engine as the controller sees it: orders and commands to its ranks go out, their reports come in."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from mcore_rl.stream.controller.engine_control import EngineControl
from mcore_rl.stream.link_store import LinkStore
from mcore_rl.stream.wire import Action, Command, Link, Order, Report, encode_command

_LAST_WORDS_S = 3.0
"""How long an engine's ranks may take to tell their side once it is known that the transfer failed."""
_POLL_S = 0.001


@dataclass(frozen=True)
class Relay:
    """How the ranks of an engine pass slices on to `engine`; the store lives as long as the link."""

    engine: "LinkedEngine"
    link: Link
    store: LinkStore


@dataclass
class LinkedEngine:
    """Its store lives as long as the link, and the store's keys with it."""

    link: Link
    store: LinkStore
    tp_size: int
    digest: str = ""
    """Of the layouts that its ranks and the trainer's agreed on."""
    serves: int | None = None
    """The version it was last committed to."""
    num_orders: int = 0
    relay: Relay | None = None

    async def command(
        self, control: EngineControl, action: Action, version: int | None = None
    ) -> None:
        """Have SGLang call the receiver in every rank; returns when all are done."""
        command_u8 = encode_command(Command(self.link, action, version))
        await control.run_loader(command_u8, self.tp_size, flush_cache=action != "connect")

    def reports(self, action: Action) -> list[Report]:
        """What the ranks said, taken out of the store; a rank that said nothing counts as failed."""
        return [self.store.take_report(action, rank) or self._silent(rank) for rank in self._ranks]

    async def reports_by(self, action: Action, deadline_s: float) -> list[Report]:
        """`reports`, once all are there; who is silent when time.monotonic() passes `deadline_s` has failed.

        A stage of a pipeline acts on a command some time after the engine has answered it.
        """
        return await self._collect(action, lambda: False, deadline_s)

    async def order(
        self, order: Order, has_failed: Callable[[], bool], deadline_s: float
    ) -> list[Report]:
        """Have the ranks receive beside the decoding; their reports, once all are there.

        Ranks that are silent when time.monotonic() passes `deadline_s`, or some time after the transfer
        `has_failed` elsewhere, count as failed.
        """
        self.store.put_order(self.num_orders, order)
        reports = await self._collect("receive", has_failed, deadline_s)
        self.store.drop_order(self.num_orders)
        self.num_orders += 1
        return reports

    def relay_to(self, engine: "LinkedEngine", host: str) -> Relay:
        """The way on to an engine with equal layouts: the last sync's, or a new one by a store on `host`."""
        own, other = self.link, engine.link
        if self.relay is None or self.relay.engine is not engine:
            store = LinkStore.serve(host, own.timeout_s)
            link = replace(
                other,
                store_host=host,
                store_port=store.port,
                num_senders=own.num_receivers,
                layouts="",
                upstream=own.engine,
            )
            self.relay = Relay(engine, link, store)
        return self.relay

    async def _collect(
        self, action: Action, has_failed: Callable[[], bool], deadline_s: float
    ) -> list[Report]:
        found: dict[int, Report] = {}
        while len(found) < len(self._ranks) and time.monotonic() < deadline_s:
            for rank in self._ranks:
                report = None if rank in found else self.store.take_report(action, rank)
                if report is not None:
                    found[rank] = report
            if has_failed() or any(report.error for report in found.values()):
                deadline_s = min(deadline_s, time.monotonic() + _LAST_WORDS_S)
            if len(found) < len(self._ranks):
                await asyncio.sleep(_POLL_S)
        return [found.get(rank) or self._silent(rank) for rank in self._ranks]

    @property
    def _ranks(self) -> range:
        return range(self.link.num_senders, len(self.link.names))

    def _silent(self, rank: int) -> Report:
        error = "did not report (see the engine's log)"
        return Report(self.link.names[rank], error=error, peer_lost=True, silent=True)
