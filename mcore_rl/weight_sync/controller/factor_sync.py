"""Brings versions of low-rank factors to engines, which merge them themselves.

    first sync over a link    all weights, as without factors; then the links of W0 and of the
                              factors are opened, and the engine shows that it merges to the bits
                              that it serves
    every later sync          factors -> merged in the second set -> swap, as for weights

From time to time, trainer ranks also publish the checksums of their merged weights, with which an
engine compares its own before and after the swap.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mcore_rl.config import LoraConfig, ModelConfig, RolloutConfig
from mcore_rl.weight_sync.controller.linked_engine import LinkedEngine
from mcore_rl.weight_sync.controller.linker import EngineLinker, LinkError
from mcore_rl.weight_sync.controller.strategy import (
    GRACE_S,
    StagedSync,
    SyncTarget,
    TrainerRanks,
    send_has_failed,
    wait_sent,
)
from mcore_rl.weight_sync.controller.sync_report import EngineSyncResult, find_root_error
from mcore_rl.weight_sync.link_store import LinkStore
from mcore_rl.weight_sync.wire import AdapterRequest, Link, Report, StageRequest
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.lora.base import find_base_sum
from mcore_rl.weights.lora.facts import AdapterFacts, sends_factors, serves_adapter
from mcore_rl.weights.lora.layouts import AdapterLayouts
from mcore_rl.weights.lora.places import AdapterStamp, Content


@dataclass(frozen=True)
class FactorOptions:
    """The factors that engines are linked for.

    stamp    of the factors that the recipe trains
    on_gpu   whether engines keep the weights below factors on their GPUs, not on the host
    targets, experts  what is adapted, as in LoraConfig
    name     of the adapter that engines serve beside the weights; empty: they merge the factors
    is_one_of_several   trainer ranks hold the factors by that name
    """

    stamp: AdapterStamp
    on_gpu: bool = False
    targets: tuple[str, ...] = ()
    experts: bool = True
    name: str = ""
    is_one_of_several: bool = False

    @property
    def held_as(self) -> str:
        """The name by which trainer ranks hold the factors; "": they hold no others."""
        return self.name if self.is_one_of_several else ""

    def record(self, layouts: str, content: Content) -> str:
        """Return the layouts of a link with that content, given encoded RecordedLayouts or ""."""
        if not layouts:
            return ""
        rank, is_whole = self.stamp.rank, bool(self.name)
        return AdapterLayouts(layouts, content, rank, self.targets, self.experts, is_whole).encode()


@dataclass(frozen=True)
class _Opening:
    """An engine that gets links for factors, and, to merge them, for the weights below them."""

    target: SyncTarget
    options: FactorOptions
    linked: Mapping[Content, LinkedEngine]

    @property
    def factors(self) -> LinkedEngine:
        return self.linked["factors"]

    @property
    def names(self) -> list[str]:
        return [linked.link.engine for linked in self.linked.values()]

    def find_link(self, kind: Content) -> Link | None:
        return self.linked[kind].link if kind in self.linked else None

    def fail(self, reason: str) -> None:
        for linked in self.linked.values():
            linked.store.fail(reason)


def choose_factors(
    lora: LoraConfig, model: ModelConfig, rollout: RolloutConfig, policy: ModelFacts, seed: int
) -> tuple[FactorOptions, ...]:
    """Return what engines that get low-rank factors are linked for; (): they get all weights.

    Several with `lora.adapters`. Reads as little of the model directory as `find_base_sum`.
    """
    if not sends_factors(lora, rollout.stage_weights) and not serves_adapter(lora):
        return ()
    base = find_base_sum(model.init, policy, seed)
    on_gpu = lora.engine_base == "gpu"
    chosen = []
    for name, own in lora.list_adapters().items():
        facts = AdapterFacts.make(own, policy.config, base, model.path)
        served_as = own.name if serves_adapter(lora) else ""
        options = on_gpu, tuple(own.targets), own.experts, served_as, bool(name)
        chosen.append(FactorOptions(facts.make_stamp(policy.config), *options))
    return tuple(chosen)


class FactorSync(StagedSync):
    """Sends all weights to engines that are linked anew, and factors to the others."""

    kinds: tuple[Content, ...] = ("base", "factors")
    """Contents of the links that are opened once an engine has all weights."""

    def __init__(
        self,
        trainers: TrainerRanks,
        timeout_s: float,
        mixed: set[str],
        relay_host: str | None,
        verify_every: int,
        factors: Sequence[FactorOptions],
        host: str,
    ) -> None:
        """As StagedSync; `host` is this process's address.

        factors   of each adapter; later syncs bring a version of the one that was chosen last, at
                  first of the first
        """
        super().__init__(trainers, timeout_s, mixed, relay_host, verify_every)
        self._factors = {options.name: options for options in factors}
        self._options = factors[0]
        self._host = host
        self._linker: EngineLinker | None = None

    def forget_trainers(self) -> None:
        self._linker = None

    def choose(self, name: str) -> None:
        """Have later syncs bring versions of the adapter `name`."""
        self._options = self._factors[name]

    async def run(self, version: int, targets: Sequence[SyncTarget]) -> list[EngineSyncResult]:
        results: dict[str, EngineSyncResult] = {}
        known = [target for target in targets if target.engine.factors]
        if known:
            results |= await self._move_factors(version, known)
        new = [target for target in targets if not target.engine.factors]
        if new:
            results |= await self._begin(version, new)
        return [results[target.url] for target in targets]

    async def _begin(
        self, version: int, targets: Sequence[SyncTarget]
    ) -> dict[str, EngineSyncResult]:
        """Bring all weights to engines that are linked anew, then factors. Return url -> result."""
        results = {result.url: result for result in await super().run(version, targets)}
        served = [target for target in targets if results[target.url].error is None]
        for opened in await self._open_links(version, served):
            results[opened.url] = add_factors(results[opened.url], opened)
        return results

    async def _move_factors(
        self, version: int, targets: Sequence[SyncTarget]
    ) -> dict[str, EngineSyncResult]:
        """Send factors of `version`; swap in what engines made of them. Return url -> result."""
        deadline_s = time.monotonic() + self._timeout_s + GRACE_S
        options = self._options
        links = {target.url: target.engine.factors[options.name].link.engine for target in targets}
        verified = [target.url for target in targets if self._is_to_verify(target)]
        sending = asyncio.ensure_future(self._send(version, list(links.values()), verified))

        async def stage(target: SyncTarget) -> list[Report]:
            request = AdapterRequest(
                options.stamp, verify=target.url in verified, name=options.name
            )
            has_failed = partial(send_has_failed, sending, links[target.url])
            of_version = StageRequest(version, adapter=request)
            return await target.engine.stage(of_version, has_failed, deadline_s)

        received = await asyncio.gather(*map(stage, targets))
        sent = await wait_sent(sending)
        swaps = []
        for target, reports in zip(targets, received, strict=True):
            result = replace(self._judge(links[target.url], reports, sent), url=target.url)
            swaps.append(self._swap(target, version, result, deadline_s))
        return {result.url: result for result in await asyncio.gather(*swaps)}

    async def _send(
        self, version: int, links: Sequence[str], verified: Sequence[str]
    ) -> Sequence[Mapping[str, Report]]:
        sent = await self._start_send(version, links)
        if verified:
            await self._trainers.publish_sums(version, verified)
        return sent

    async def _open_links(
        self, version: int, targets: Sequence[SyncTarget]
    ) -> list[EngineSyncResult]:
        """Open links for factors with engines that have the weights of `version`."""
        results: list[EngineSyncResult] = []
        for options in self._factors.values():
            opened = await self._open_links_of(options, version, targets)
            results = add_up(results, opened)
            targets = [target for target in targets if _is_served(target, results)]
        return results

    async def _open_links_of(
        self, options: FactorOptions, version: int, targets: Sequence[SyncTarget]
    ) -> list[EngineSyncResult]:
        """Open the links for the factors of one adapter."""
        if not targets:
            return []
        deadline_s = time.monotonic() + self._timeout_s + GRACE_S
        openings = [
            _Opening(
                target,
                options,
                {kind: self._make_link(target.engine, kind, options) for kind in self.kinds},
            )
            for target in targets
        ]
        sending = asyncio.ensure_future(self._join_and_send(version, openings, deadline_s))
        received = await asyncio.gather(
            *(self._stage_opening(version, each, sending, deadline_s) for each in openings)
        )
        sent = await wait_sent(sending)
        results = []
        for opening, reports in zip(openings, received, strict=True):
            target = opening.target
            result = self._judge(opening.factors.link.engine, reports, sent)
            error = result.error
            if error is None:
                target.engine.factors[options.name] = opening.factors
            else:
                error = f"engine {target.url} cannot take factors: {error}"
            results.append(replace(result, url=target.url, error=error))
        return results

    async def _stage_opening(
        self,
        version: int,
        opening: _Opening,
        sending: "asyncio.Future[Sequence[Mapping[str, Report]]]",
        deadline_s: float,
    ) -> list[Report]:
        options = opening.options
        base, factors = opening.find_link("base"), opening.find_link("factors")
        request = AdapterRequest(
            options.stamp, base, factors, on_gpu=options.on_gpu, name=options.name
        )
        of_version = StageRequest(version, adapter=request)
        has_failed = partial(send_has_failed, sending, opening.factors.link.engine)
        reports = await opening.target.engine.stage(of_version, has_failed, deadline_s)
        error = find_root_error(reports)
        if error is not None:
            opening.fail(error)  # No trainer rank waits for this engine any longer.
        return reports

    async def _join_and_send(
        self, version: int, openings: Sequence[_Opening], deadline_s: float
    ) -> Sequence[Mapping[str, Report]]:
        """Have the trainer ranks join all links, and send over those that they joined.

        Returns for each rank a report for each link of factors, as TrainerRanks.send does.
        """
        linker = await self._find_linker()
        errors = await asyncio.gather(*(_join(linker, opening, deadline_s) for opening in openings))
        joined = [each for each, error in zip(openings, errors, strict=True) if error is None]
        sent: Sequence[Mapping[str, Report]] = [{} for _ in range(self._trainers.world_size)]
        if joined:
            names = [name for opening in joined for name in opening.names]
            sent = await self._start_send(version, names)
        failed = {
            opening.factors.link.engine: Report("trainer ranks", error=error, peer_lost=True)
            for opening, error in zip(openings, errors, strict=True)
            if error is not None
        }
        return [{**of_rank, **failed} for of_rank in sent]

    async def _find_linker(self) -> EngineLinker:
        if self._linker is None:
            facts: dict[Content, Sequence[bytes]] = {
                kind: await self._trainers.describe(kind) for kind in self.kinds
            }
            self._linker = EngineLinker(self._trainers, facts)
        return self._linker

    def _make_link(
        self, engine: LinkedEngine, kind: Content, options: FactorOptions
    ) -> LinkedEngine:
        """Return a link of the engine's ranks with a store of its own."""
        store = LinkStore.serve(self._host, engine.link.timeout_s)
        what = f"{kind} of {options.held_as}" if options.held_as else kind
        link = replace(
            engine.link,
            engine=f"{engine.link.engine} ({what})",
            adapter=options.held_as,
            store_host=self._host,
            store_port=store.port,
            store_key=store.key,
            staged=False,
            layouts=options.record(engine.link.layouts, kind),
            delta="off",
            pull=False,
            loaded=False,
            content=kind,
        )
        store.keep(link)
        return LinkedEngine(link, store, engine.tp_size)


async def _join(linker: EngineLinker, opening: _Opening, deadline_s: float) -> str | None:
    """Have the trainer ranks join both links of an engine; return the error, if there is one."""
    try:
        for linked in opening.linked.values():
            answers = await linker.join(linked, deadline_s)
            failed = [each for each in answers if isinstance(each, Report)]
            if failed:
                raise LinkError(find_root_error(failed))
    except RuntimeError as error:
        opening.fail(str(error))
        return str(error)
    return None


def add_factors(whole: EngineSyncResult, opened: EngineSyncResult) -> EngineSyncResult:
    """Return the result of an engine's weights, `whole`, with that of its first factors."""
    return replace(whole, error=opened.error, num_bytes=whole.num_bytes + opened.num_bytes)


def add_up(
    before: Sequence[EngineSyncResult], more: Sequence[EngineSyncResult]
) -> list[EngineSyncResult]:
    """Return the results of engines, with what they got of another adapter."""
    added = {result.url: result for result in before}
    for result in more:
        if result.url in added:
            result = replace(result, num_bytes=result.num_bytes + added[result.url].num_bytes)
        added[result.url] = result
    return list(added.values())


def _is_served(target: SyncTarget, results: Sequence[EngineSyncResult]) -> bool:
    return all(result.error is None for result in results if result.url == target.url)
