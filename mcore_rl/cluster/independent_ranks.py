"""Calls workers that do not need one another: the death of one leaves the others as they are."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import ray

from mcore_rl.cluster.answers import Answers, RankDied
from mcore_rl.cluster.group import RankGroup

_POLL_S = 0.2


class IndependentRanks(RankGroup):
    """Ranks that do not wait for one another: the failure of one leaves the others as they are."""

    async def build_one(
        self, rank: int, worker_cls: type, args: Sequence[Any], deadline_s: float
    ) -> None:
        """Make the worker of a process that was started again. Raises RankError."""
        ref = self._actors[rank].build.remote(deadline_s, worker_cls, *args)
        await Answers("start-up", [ref], [self.ranks[rank]], deadline_s).wait_async()

    async def wait_for_process(self, rank: int, deadline_s: float) -> None:
        """Return once Ray has a process again for a rank that died.

        Calls that come earlier may go to the dead one. Raises RankDied if there is none in time.
        """
        until_s = time.monotonic() + deadline_s
        while True:
            ref = self._actors[rank].pid.remote()
            try:
                await Answers("start-up", [ref], [self.ranks[rank]], deadline_s).wait_async()
            except RankDied:
                if time.monotonic() > until_s:
                    raise
                await asyncio.sleep(_POLL_S)
            else:
                return

    async def gather_living(
        self, ranks: Sequence[int], method: str, *args: object, deadline_s: float
    ) -> dict[int, Any]:
        """Make a call on some ranks; return answers by rank, a RankDied for one that is dead.

        Raises RankError if a rank raises or does not answer in time.
        """
        refs = [self._actors[rank].call.remote(deadline_s, method, *args) for rank in ranks]
        answers = [
            Answers(method, [ref], [self.ranks[rank]], deadline_s).wait_async()
            for rank, ref in zip(ranks, refs, strict=True)
        ]
        results: dict[int, Any] = {}
        waiting = await asyncio.gather(*answers, return_exceptions=True)
        for rank, result in zip(ranks, waiting, strict=True):
            if isinstance(result, RankDied):
                results[rank] = result
            elif isinstance(result, BaseException):
                raise result
            else:
                results[rank] = result[0]
        return results

    def kill_ranks(self, ranks: Sequence[int]) -> None:
        """Kill the processes of some ranks; what they started dies with them."""
        for rank in ranks:
            ray.kill(self._actors[rank])

    def call_living(self, ranks: Sequence[int], method: str, *, deadline_s: float) -> None:
        """Make a call on some ranks; those that died meanwhile are left out. Raises RankError."""
        refs = [self._actors[rank].call.remote(deadline_s, method) for rank in ranks]
        for rank, ref in zip(ranks, refs, strict=True):
            with contextlib.suppress(RankDied):
                Answers(method, [ref], [self.ranks[rank]], deadline_s).wait()

    def _fail(self, error: BaseException) -> None:
        pass
