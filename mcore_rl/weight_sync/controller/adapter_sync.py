"""Brings versions of low-rank factors to engines that serve them as an adapter.

    first sync over a link    weights below the factors -> second set; factors -> host memory;
                              then both are swapped in at once
    every later sync          factors -> host memory -> another adapter of SGLang

The weights in an engine never change after the first sync. Requests in flight go on with the new
version, as in syncs of weights.
"""

from collections.abc import Mapping, Sequence

from mcore_rl.weight_sync.controller.factor_sync import FactorSync, add_factors
from mcore_rl.weight_sync.controller.strategy import StagedSync, SyncTarget
from mcore_rl.weight_sync.controller.sync_report import EngineSyncResult
from mcore_rl.weight_sync.wire import Report
from mcore_rl.weights.lora.places import Content


class AdapterSync(FactorSync):
    """Sends the weights below the factors to engines that are linked anew, and factors to all."""

    kinds: tuple[Content, ...] = ("factors",)

    async def _begin(
        self, version: int, targets: Sequence[SyncTarget]
    ) -> dict[str, EngineSyncResult]:
        """Bring weights and factors, which `_swap_all` opens links for. Return url -> result."""
        return {result.url: result for result in await StagedSync.run(self, version, targets)}

    async def _swap_all(
        self,
        version: int,
        staged: Sequence[tuple[SyncTarget, EngineSyncResult]],
        deadline_s: float,
    ) -> dict[str, EngineSyncResult]:
        """Bring the factors as well before the weights are swapped in."""
        served = [target for target, result in staged if result.error is None]
        opened = {result.url: result for result in await self._open_links(version, served)}
        both: list[tuple[SyncTarget, EngineSyncResult]] = []
        for target, whole in staged:
            own = opened.get(target.url)
            both.append((target, whole if own is None else add_factors(whole, own)))
        return await super()._swap_all(version, both, deadline_s)

    async def _send(
        self, version: int, links: Sequence[str], verified: Sequence[str]
    ) -> Sequence[Mapping[str, Report]]:
        return await self._start_send(version, links)

    async def _command_swap(self, target: SyncTarget, version: int) -> None:
        """Install the version of the adapter that came.

        The first time it is a version of each adapter, and the weights below them are swapped in.
        """
        is_first = target.engine.served_version is None
        await target.engine.command(
            target.control,
            "swap",
            version,
            verify=self._is_to_verify(target),
            adapters=tuple(self._factors) if is_first else (self._options.name,),
            weights=is_first,
        )
