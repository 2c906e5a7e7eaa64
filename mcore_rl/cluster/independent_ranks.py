"""Calls ranks that do not wait for one another: if one dies, the others go on."""

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from mcore_rl.cluster.answers import Answers, Rank, RankDiedError, RankError
from mcore_rl.cluster.group import ActorPlan, RankGroup, name_nodes
from mcore_rl.planning.slots import Slot

_POLL_S = 0.2


class IndependentRanks(RankGroup):
    """Ranks that do not wait for one another: the failure of one leaves the others as they are."""

    def add_ranks(self, slots: Sequence[Slot], log_dir: Path) -> None:
        """Start the processes of further ranks, numbered after the others."""
        for slot in slots:
            k = len(self.ranks)
            rank = Rank(self.role, k, log_dir / f"{self.role}_rank{k}.log")
            actor = self._start(ActorPlan.make(rank, slot, None, threads=1))
            self._actors.append(actor)
            self.ranks.append(rank.name_process(slot.node, actor.pid.remote()))

    def replace_ranks(self, ranks: Mapping[int, Slot]) -> None:
        """Start processes in place of those of some ranks, which are killed if they still live."""
        for k, slot in ranks.items():
            ray.kill(self._actors[k])
            self._actors[k] = self._start(ActorPlan.make(self.ranks[k], slot, None, threads=1))
            self.ranks[k] = self.ranks[k].name_process(slot.node, self._actors[k].pid.remote())

    async def find_node(self, rank: int, deadline_s: float) -> str:
        """Return Ray's id of the node of a rank, which may not be that of the start.

        Messages name it from now on.
        """
        [node] = await self._ask([rank], "node_id", deadline_s)
        names = await asyncio.to_thread(name_nodes)
        self.ranks[rank] = replace(self.ranks[rank], node_id=node, node=names.get(node, ""))
        return node

    async def ask_gpus(self, ranks: Sequence[int], deadline_s: float) -> list[tuple[str, ...]]:
        """Return the GPUs of its machine that Ray assigned to each of some ranks."""
        return await self._ask(ranks, "gpu_ids", deadline_s)

    async def ask_meeting_points(
        self, ranks: Sequence[int], deadline_s: float
    ) -> list[tuple[str, int]]:
        """Return (address, free port) of the machines of some ranks; see find_meeting_points."""
        return await self._ask(ranks, "find_meeting_point", deadline_s)

    async def _ask(self, ranks: Sequence[int], question: str, deadline_s: float) -> list[Any]:
        """Return what the actors of some ranks answer before they have a worker."""
        refs = [getattr(self._actors[rank], question).remote() for rank in ranks]
        asked = [self.ranks[rank] for rank in ranks]
        return await Answers("start-up", refs, asked, deadline_s).wait_async()

    async def build_one(
        self, rank: int, worker_cls: type, args: Sequence[Any], deadline_s: float
    ) -> None:
        """Make the worker of a restarted process. Raises RankError."""
        ref = self._actors[rank].build.remote(deadline_s, worker_cls, *args)
        await Answers("start-up", [ref], [self.ranks[rank]], deadline_s).wait_async()

    async def wait_for_process(self, rank: int, deadline_s: float) -> None:
        """Return once Ray has restarted the process of a rank that died.

        Earlier calls may go to the dead process. Raises RankDiedError if Ray takes too long.
        """
        until_s = time.monotonic() + deadline_s
        while True:
            ref = self._actors[rank].pid.remote()
            try:
                await Answers("start-up", [ref], [self.ranks[rank]], deadline_s).wait_async()
            except RankDiedError:
                if time.monotonic() > until_s:
                    raise
                await asyncio.sleep(_POLL_S)
            else:
                return

    async def gather_living(
        self,
        ranks: Sequence[int],
        method: str,
        *args: object,
        deadline_s: float,
        losses: type[RankError] = RankDiedError,
    ) -> dict[int, Any]:
        """Make a call on some ranks; return rank -> answer, or the error of a rank that is lost.

        losses   the errors that count as a loss

        Raises RankError if a rank raises another error or does not answer in time.
        """
        refs = [self._actors[rank].call.remote(deadline_s, method, *args) for rank in ranks]
        answers = [
            Answers(method, [ref], [self.ranks[rank]], deadline_s).wait_async()
            for rank, ref in zip(ranks, refs, strict=True)
        ]
        results: dict[int, Any] = {}
        waiting = await asyncio.gather(*answers, return_exceptions=True)
        for rank, result in zip(ranks, waiting, strict=True):
            if isinstance(result, losses):
                results[rank] = result
            elif isinstance(result, BaseException):
                raise result
            else:
                results[rank] = result[0]
        return results

    def kill_ranks(self, ranks: Sequence[int]) -> None:
        """Kill the processes of some ranks, and their children."""
        for rank in ranks:
            ray.kill(self._actors[rank])

    def kill_process(self, rank: int) -> None:
        """Kill the process of a rank, which Ray starts again where ranks return."""
        ray.kill(self._actors[rank], no_restart=False)

    def call_living(self, ranks: Sequence[int], method: str, *, deadline_s: float) -> None:
        """Make a call on some ranks; ignore ranks that died meanwhile. Raises RankError."""
        refs = [self._actors[rank].call.remote(deadline_s, method) for rank in ranks]
        for rank, ref in zip(ranks, refs, strict=True):
            with contextlib.suppress(RankDiedError):
                Answers(method, [ref], [self.ranks[rank]], deadline_s).wait()

    def _fail(self, error: BaseException) -> None:
        pass
