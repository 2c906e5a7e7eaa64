"""Runs in each trainer rank: sends slices of the rank's parameters to engines."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

from mcore_rl.device.gpu_memory import common_device
from mcore_rl.device.threads import open_pool
from mcore_rl.process.gc_pause import pause_collections
from mcore_rl.weight_sync.adapter.sums import SumsPublisher
from mcore_rl.weight_sync.execute import PlanExecutor
from mcore_rl.weight_sync.link_end import LinkEnd, describe_rank
from mcore_rl.weight_sync.link_store import DATA, ERROR
from mcore_rl.weight_sync.plan_handshake import Drafts, PlanHandshake
from mcore_rl.weight_sync.roster import Roster
from mcore_rl.weight_sync.transports.select import (
    MakeTransport,
    select_transport,
    waits_for_peers,
)
from mcore_rl.weight_sync.waits import TransferError
from mcore_rl.weight_sync.wire import Link, Report
from mcore_rl.weights.box import Shard
from mcore_rl.weights.lora.places import Content, Held

_MOST_AT_ONCE = 4
"""Links that a rank opens at a time, so that a missing engine does not delay other links."""
SENDER_GRACE_S = 2.0
"""How much longer senders wait than the engine's ranks, so that a receiver's error comes first.

A receiver knows for which sender it waits. To all other senders, the receiver itself seems late.
"""


class WeightSender:
    """Sends to any number of engines, each over its own link; a failure affects only its link."""

    def __init__(
        self,
        shards: Sequence[Shard],
        tensors: Mapping[str, Tensor],
        rank: int,
        make_transport: MakeTransport = select_transport,
        adapter: Mapping[Content, Held] | None = None,
        unadapted: Callable[[], AbstractContextManager[None]] = nullcontext,
        adapters: Mapping[str, Held] | None = None,
    ) -> None:
        """`shards` describes `tensors`, the rank's parameters, which each send reads anew.

        adapter     the same of low-rank factors ("factors"), and of the weights below them ("base")
        adapters    the same of the factors of several adapters, by name
        unadapted   opens a block in which `tensors` are the weights below the factors
        """
        self._unadapted = unadapted
        self._held: dict[Content, Held] = {"weights": (shards, tensors), **(adapter or {})}
        self._adapters = adapters or {}
        own = {tensor.data_ptr() for tensor in tensors.values()}
        base = self._held["base"][1] if "base" in self._held else {}
        self._is_base_live = any(tensor.data_ptr() in own for tensor in base.values())
        """Whether the weights below factors are sent from `tensors`."""
        self._rank = rank
        self._make_transport = make_transport
        self._device = common_device(tensors.values())
        self._publishers: dict[str, SumsPublisher] = {}
        """Publish checksums of the weights, by engine."""
        self._executors: dict[str, PlanExecutor] = {}
        self._handshakes: dict[str, PlanHandshake] = {}
        """Those of planned links that are not open yet, by engine."""
        self._drafts = Drafts()

    def describe(self, content: Content = "weights") -> bytes:
        """Return this rank's encoded RankFacts, which hold for all links with that content."""
        return describe_rank(self._find_device(content), is_sender=True).encode()

    def plan_links(self, offers: Sequence[tuple[Link, bytes]]) -> list[bytes]:
        """Plan this rank's part of each (link, encoded roster); return its encoded PlanAnswers.

        Does not wait for other ranks. Drops earlier links to the same engines.
        """
        with pause_collections():
            # Engines that share no host with trainer ranks have equal rosters.
            decode = cache(Roster.decode)
            return [self._plan(link, decode(encoded)) for link, encoded in offers]

    def open_links(self, verdicts: Sequence[tuple[str, str]]) -> list[str | Report]:
        """Connect by the plans of plan_links, given (engine, problems of the recorded layouts).

        Returns for each link the digest of its plan, or the report of an error, which does not
        affect the other links.
        """
        opened: dict[str, str | Report] = {}
        waiting: list[tuple[str, str]] = []
        with pause_collections():
            for engine, problems in verdicts:
                if problems or waits_for_peers(self._handshakes[engine].end):
                    waiting.append((engine, problems))
                else:
                    opened[engine] = self._open(engine, problems)
            with open_pool(self._device, _MOST_AT_ONCE, "links") as pool:
                reports = pool.map(lambda verdict: self._open(*verdict), waiting)
                opened |= zip((engine for engine, _ in waiting), reports, strict=True)
        return [opened[engine] for engine, _ in verdicts]

    def connect(self, link: Link) -> Report:
        """Meet the link's other ranks at the link's store, without calls of a controller.

        Replaces an earlier link to the same engine. The report's `error` says of a failure.
        """
        self.disconnect(link.engine)
        end = LinkEnd.open(link, self._rank, self._find_device(link.content))
        shards = self._find_held(link)[0]
        return self._report(
            link, lambda: PlanExecutor.meet(end, lambda _: shards, self._make_transport)
        )

    def _plan(self, link: Link, roster: Roster) -> bytes:
        self.disconnect(link.engine)
        device = self._find_device(link.content)
        end = LinkEnd.open(link, self._rank, device, roster=roster)
        shards = self._find_held(link)[0]
        handshake = PlanHandshake(end, lambda _: shards, self._drafts)
        self._handshakes[link.engine] = handshake
        try:
            return DATA + handshake.answer()
        except (RuntimeError, ValueError) as error:
            return ERROR + str(error).encode()

    def _open(self, engine: str, problems: str) -> str | Report:
        handshake = self._handshakes.pop(engine)

        def connect() -> PlanExecutor:
            plan = handshake.conclude(problems)
            return PlanExecutor.open(handshake.end, plan, self._make_transport)

        report = self._report(handshake.end.link, connect)
        return report.digest if report.error is None else report

    def _report(self, link: Link, connect: Callable[[], PlanExecutor]) -> Report:
        try:
            executor = connect()
        except (RuntimeError, ValueError) as error:
            peer_lost = isinstance(error, TransferError) and error.peer_lost
            return Report(link.name_rank(self._rank), error=str(error), peer_lost=peer_lost)
        self._executors[link.engine] = executor
        return Report(executor.end.name, executor.plan.digest, executor.num_bytes)

    def disconnect(self, engine: str) -> None:
        """Drop the link to `engine`, if there is one."""
        self._handshakes.pop(engine, None)
        self._publishers.pop(engine, None)
        executor = self._executors.pop(engine, None)
        if executor is not None:
            executor.close()

    def close(self) -> None:
        """Drop all links, so that engines that wait for this rank fail at once."""
        for engine in {*self._handshakes, *self._executors}:
            self.disconnect(engine)

    def send(self, version: int, engines: Sequence[str], timeout_s: float) -> dict[str, Report]:
        """Send the current parameters as `version` to all `engines`; return engine -> report.

        A link whose transfer failed is dropped, because its messages are out of step; connect the
        engine again. Raises ValueError if an engine is not connected.
        """
        self._refuse_unknown(engines)
        links = [self._executors[engine].end.link for engine in engines]
        if any(self._needs_base(link) for link in links):
            with self._unadapted():
                return self._send(version, engines, timeout_s)
        return self._send(version, engines, timeout_s)

    def _needs_base(self, link: Link) -> bool:
        """Return whether what is sent over a link must have the weights below the factors."""
        if link.content == "base":
            return self._is_base_live
        return link.unadapted and link.content == "weights"

    def _send(self, version: int, engines: Sequence[str], timeout_s: float) -> dict[str, Report]:
        if len(engines) == 1:
            return {engines[0]: self._send_to(engines[0], version, timeout_s)}
        with open_pool(self._device, max(1, len(engines)), "weights") as pool:
            reports = pool.map(lambda engine: self._send_to(engine, version, timeout_s), engines)
            return dict(zip(engines, reports, strict=True))

    @torch.no_grad()
    def publish_sums(self, version: int, engines: Sequence[str]) -> None:
        """Publish checksums of the current weights to engines that computed `version` themselves.

        Raises ValueError if an engine is not connected.
        """
        self._refuse_unknown(engines)
        for engine in engines:
            if engine not in self._publishers:
                executor = self._executors[engine]
                self._publishers[engine] = SumsPublisher(executor.end, executor.plan)
            self._publishers[engine].publish(version, self._held["weights"][1])

    def _refuse_unknown(self, engines: Sequence[str]) -> None:
        unknown = set(engines) - set(self._executors)
        if unknown:
            raise ValueError(f"engines {sorted(unknown)} are not connected; call connect first")

    def _find_held(self, link: Link) -> Held:
        return self._adapters[link.adapter] if link.adapter else self._held[link.content]

    def _find_device(self, content: Content) -> torch.device:
        return common_device(self._held[content][1].values())

    @torch.no_grad()
    def _send_to(self, engine: str, version: int, timeout_s: float) -> Report:
        executor = self._executors[engine]
        began_s = time.monotonic()
        tensors = self._find_held(executor.end.link)[1]
        try:
            executor.execute(version, tensors, began_s + timeout_s + SENDER_GRACE_S)
            report = executor.make_report(began_s)
            if executor.end.link.content == "base":
                self.disconnect(engine)  # It never changes.
            return report
        except TransferError as error:
            self.disconnect(engine)
            return Report(executor.end.name, error=str(error), peer_lost=error.peer_lost)
