"""Requests for groups that are held back and resumed together, on all collectors."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mcore_rl.rollout.request import Sampling
from mcore_rl.types import Prompt, StoredSample

if TYPE_CHECKING:
    from mcore_rl.rollout.collector_pool import CollectorPool


class PoolSession:
    """Requests that share one bound; they can be held back while weights change.

    Does what rollout.client.RolloutSession does, on all collectors.
    """

    def __init__(
        self, pool: "CollectorPool", number: int, max_in_flight: int, on_done: Callable[[], None]
    ) -> None:
        self.number = number
        self.max_in_flight = max_in_flight
        self._pool = pool
        self._on_done = on_done
        self.is_held = False
        self.num_open = 0
        """Samples begun and not done."""
        self.num_cut_off = 0
        """Responses that `hold` aborted half-way, to be sampled again."""

    async def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[StoredSample]:
        """Return `num_samples` samples of each prompt, in the order of `prompts`.

        Prompts whose responses were long in earlier epochs begin first, so that none of them is
        left when the others are done.

        Raises RolloutError for a request that failed on all engines, and then cancels the others.
        """
        self.num_open += len(prompts) * num_samples
        groups = {
            i: self._pool.begin(self, prompts[i], num_samples, sampling)
            for i in self._pool.history.longest_first(prompts)
        }
        try:
            await asyncio.gather(*groups.values())
            return [sample for i in range(len(prompts)) for sample in groups[i].result()]
        finally:
            for group in groups.values():
                group.cancel()

    def note_done(self, num_samples: int) -> None:
        self.num_open -= num_samples
        self._on_done()

    async def hold(self, *, cut_off: bool) -> None:
        """Post nothing more, and return once no request is under way; `resume` ends it."""
        self.is_held = True
        self.num_cut_off = await self._pool.hold(self, cut_off=cut_off)

    async def resume(self) -> None:
        """Let requests be posted again; without a hold, do nothing."""
        if self.is_held:
            await self._pool.resume(self)
            self.is_held = False
