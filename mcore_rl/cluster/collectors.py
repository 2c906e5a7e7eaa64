"""Runs a collector on each node that has engines; the controller calls them as one group.

If a collector's process dies, only its samples are lost. Ray restarts the process, and `restart`
builds an empty collector there: on its node or, if that is lost, on another node with room. Without
room the other collectors go on alone.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from mcore_rl.batches.group_files import GroupFile
from mcore_rl.batches.stored_batch import home_of
from mcore_rl.cluster.answers import RankDiedError, RankError, RankStoppedError
from mcore_rl.cluster.independent_ranks import IndependentRanks
from mcore_rl.cluster.nodes import list_alive_nodes
from mcore_rl.cluster.placement import ROOM_S, find_room
from mcore_rl.cluster.stores import StoreHandles, share_array
from mcore_rl.config.deadlines import STOPPED_S
from mcore_rl.planning.slots import Slot
from mcore_rl.process.lost_samples import SamplesLostError, join_losses
from mcore_rl.process.process_state import RestartBudget
from mcore_rl.rollout.collector import CollectorCommands, CollectorEvents, CollectorLostError
from mcore_rl.rollout.engine_spec import EngineAddress
from mcore_rl.rollout.served_models import ServedEndpoint
from mcore_rl.types import Sample, StoredBatch, StoredSample, TokenWork
from mcore_rl.types.scores import Scores, join_scores
from mcore_rl.workers.collector_worker import CollectorSpec, CollectorWorker

_log = logging.getLogger(__name__)
T = TypeVar("T")
THREADS = 64
"""Calls that a collector answers at the same time, long polls and reads included."""
NODE_LOSS_SHOWS_S = 30.0
"""How long Ray may take to find that a node is gone once its processes died."""
NODE_POLL_S = 1.0


@dataclass(frozen=True)
class CollectorLimits:
    """Deadlines and restarts of the collectors.

    hold_timeout_s      for requests under way to end
    score_timeout_s     for the scores of samples
    startup_timeout_s   for a process to be built
    restarts            of each collector in an hour; the next death on a living node ends the run
    stopped_s           how long its process may be stopped (SIGSTOP) before it is killed
    """

    call_timeout_s: float
    hold_timeout_s: float
    score_timeout_s: float
    startup_timeout_s: float
    restarts: int = 3
    stopped_s: float | None = STOPPED_S


class CollectorGroup:
    """The collectors of a run, one per node that has engines of the policy."""

    def __init__(
        self, engine_slots: Sequence[Sequence[Slot]], log_dir: Path, limits: CollectorLimits
    ) -> None:
        """Start the processes, without waiting for them.

        `engine_slots` has the slots of each engine; a collector sits beside the first of a node.
        """
        nodes: dict[str, Slot] = {}
        for slots in engine_slots:
            nodes.setdefault(slots[0].node, replace(slots[0], bundle={"CPU": 0}, sharers=0))
        self._nodes = list(nodes)
        self._slots = list(nodes.values())
        self._home = [self._nodes.index(slots[0].node) for slots in engine_slots]
        self._group = IndependentRanks(
            "collector", self._slots, log_dir, threads=THREADS, returns=True
        )
        self._limits = limits
        self._building: Any = None
        self._spec: CollectorSpec | None = None
        self._connections: list[tuple[Any, ...]] = []
        self.engines_of: list[list[str]] = []
        """Urls of the engines that each collector asks first, as they were at the start."""
        self._budgets = [RestartBudget() for _ in self._nodes]
        self._gone: set[int] = set()
        self.stores = StoreHandles(self._group.actors, limits.call_timeout_s)

    def start_build(self, spec: CollectorSpec) -> None:
        self._spec = spec
        args = [(spec, k, 0, share_array) for k in range(len(self._nodes))]
        self._building = self._group.start_build(
            CollectorWorker, args, self._limits.startup_timeout_s
        )

    def connect(
        self, engines: Sequence[EngineAddress], served: Mapping[str, ServedEndpoint]
    ) -> None:
        """Wait until the collectors are built; tell them their engines and the served models."""
        self._group.finish(self._building)
        self.engines_of = [
            [e.url for e, home in zip(engines, self._home, strict=True) if home == k]
            for k in range(len(self._nodes))
        ]
        self._connections = [
            (tuple(engines), urls, dict(served), self.stores) for urls in self.engines_of
        ]
        deadline_s = self._limits.call_timeout_s
        self._group.call_each("connect", self._connections, deadline_s=deadline_s)

    def find_home(self, engine: int) -> int:
        """Return the collector that asks an engine first, which has moved or was added.

        It is the one that did before. Without one, or if it is gone, it is another one in turn.
        """
        there = [k for k in range(len(self._nodes)) if k not in self._gone] or [0]
        home = self._home[engine] if engine < len(self._home) else -1
        return home if home in there else there[engine % len(there)]

    def list_calls(self) -> list["RemoteCollector"]:
        """Return the collectors, each as rollout.collector.CollectorCalls."""
        return [RemoteCollector(self, k) for k in range(len(self._nodes))]

    def first_of_nodes(self) -> dict[str, Any]:
        """See RankGroup.first_of_nodes."""
        return self._group.first_of_nodes()

    async def restart(self, k: int, first_group: int) -> bool:
        """Build a lost collector anew, without samples; return False if its node is gone and no
        other one has room.

        Groups with numbers below `first_group` are lost. Raises RankError if the build fails, or if
        the collector has died too often.
        """
        building = asyncio.create_task(self._build_anew(k, first_group))
        leaving = asyncio.create_task(self._wait_until_gone(k))
        try:
            await asyncio.wait([building, leaving], return_when=asyncio.FIRST_COMPLETED)
            if building.done():
                building.result()
                return True
        finally:
            building.cancel()
            leaving.cancel()
            await asyncio.gather(building, leaving, return_exceptions=True)
        self._gone.add(k)
        self._group.kill_ranks([k])  # Without an end, calls would wait for its return.
        _log.warning("%s is gone with its node, and no other one has room", self._group.ranks[k])
        return False

    async def score(self, samples: Sequence[StoredSample]) -> Scores:
        """Return the rewards of samples, in their order. Raises SamplesLostError."""
        parts, order = _split_by_store(samples)
        scores = join_scores(await self._call_stores("score", parts))
        return scores if len(parts) == 1 else scores.select(order)

    async def ask_teacher(self, samples: Sequence[StoredSample]) -> None:
        """Have the teacher score samples; the stores keep its log-probs.

        Raises SamplesLostError if a store is lost.
        """
        parts: dict[int, tuple[list[int], list[int], list[int]]] = {}
        for sample in samples:
            for row in sample.rows:
                group_N, row_N, lens_N = parts.setdefault(sample.lease.store, ([], [], []))
                group_N.append(sample.lease.group)
                row_N.append(row.index)
                lens_N.append(row.num_tokens)
        await self._call_stores("ask_teacher", parts)

    async def samples(self, samples: Sequence[StoredSample]) -> list[Sample]:
        """Fetch samples from their stores, in their order. Raises SamplesLostError."""
        parts, order = _split_by_store(samples)
        found = [sample for part in await self._call_stores("samples", parts) for sample in part]
        return [found[i] for i in order]

    async def write_groups(
        self, folder: Path, groups: Mapping[int, Sequence[int]]
    ) -> dict[int, GroupFile]:
        """Have stores write groups to files in a folder; return the file of each store.

        groups   their numbers, by store

        Raises RankError if a store cannot, and SamplesLostError if one is lost.
        """
        parts = {store: (str(folder), list(own)) for store, own in groups.items()}
        return dict(zip(parts, await self._call_stores("write_groups", parts), strict=True))

    async def read_groups(
        self, store: int, folder: Path, file: GroupFile, numbers: Mapping[int, int]
    ) -> None:
        """Have a store take the groups of a file, by their numbers there and from now on.

        Raises RankError if it cannot.
        """
        deadline_s = self._limits.score_timeout_s
        await self.call(
            store, "read_groups", str(folder), file, dict(numbers), deadline_s=deadline_s
        )

    async def apply(
        self, works: Sequence[tuple[TokenWork[T], StoredBatch]]
    ) -> list[tuple[StoredBatch, T]]:
        """Return the batches with the fields that their functions set, and the functions' results.

        Each function runs in the collector that has most tokens of the function's batch. A
        collector runs one function after the other, so it holds the tokens of one batch at a time.
        Raises SamplesLostError.
        """
        places: dict[int, list[int]] = {}
        for place, (_, batch) in enumerate(works):
            places.setdefault(home_of(batch), []).append(place)
        parts = {store: ([works[i] for i in own],) for store, own in places.items()}
        answers = await self._call_stores("apply", parts)
        made: dict[int, tuple[StoredBatch, T]] = {}
        for own, answer in zip(places.values(), answers, strict=True):
            for i, (columns, returned) in zip(own, answer, strict=True):
                made[i] = (replace(works[i][1], **columns), returned)
        return [made[i] for i in range(len(works))]

    def close(self) -> None:
        """End the processes that the collectors have started."""
        there = [k for k in range(len(self._nodes)) if k not in self._gone]
        self._group.call_living(there, "close", deadline_s=self._limits.call_timeout_s)

    async def call(
        self, k: int, method: str, *args: object, deadline_s: float | None = None
    ) -> Any:
        """Call collector `k` and return its answer. Raises RankDiedError if its process is gone."""
        if deadline_s is None:
            deadline_s = self._limits.call_timeout_s
        return await self._group.call_one_async(k, method, *args, deadline_s=deadline_s)

    async def poll_events(
        self, k: int, wait_s: float, gather_s: float, deadline_s: float
    ) -> CollectorEvents:
        """Call `poll_events` of collector `k`. Its process is killed if it is stopped for long.

        Raises RankDiedError if the process is gone.
        """
        call = "poll_events", wait_s, gather_s
        stopped_s = self._limits.stopped_s
        try:
            return await self._group.call_one_async(
                k, *call, deadline_s=deadline_s, stopped_s=stopped_s
            )
        except RankStoppedError as stopped:
            self._group.kill_process(k)
            raise RankDiedError(f"{stopped}, and is killed", [k]) from stopped

    @property
    def call_timeout_s(self) -> float:
        return self._limits.call_timeout_s

    @property
    def hold_timeout_s(self) -> float:
        return self._limits.hold_timeout_s

    async def _call_stores(self, method: str, parts: Mapping[int, Sequence[Any]]) -> list[Any]:
        """Call stores, each with arguments of its own; return their answers."""
        calls = (self._call_store(store, method, args) for store, args in parts.items())
        answers = await asyncio.gather(*calls)
        if losses := [answer for answer in answers if isinstance(answer, SamplesLostError)]:
            raise join_losses(losses)
        return answers

    async def _call_store(self, store: int, method: str, args: Sequence[Any]) -> Any:
        try:
            deadline_s = self._limits.score_timeout_s
            return await self.call(store, method, *args, deadline_s=deadline_s)
        except RankDiedError as error:
            return SamplesLostError(str(error), [store])
        except SamplesLostError as lost:
            return lost

    async def _build_anew(self, k: int, first_group: int) -> None:
        rank = self._group.ranks[k]
        limits = self._limits
        budget = self._budgets[k]
        if not budget.take(limits.restarts):
            await asyncio.sleep(NODE_LOSS_SHOWS_S)
            if await self._is_node_there(k):
                deaths = budget.num_recent + 1
                times = "once" if deaths == 1 else f"{deaths} times within an hour"
                raise RankError(f"{rank} died {times}; see the end of its log")
        counts = (budget.num_recent, limits.restarts)
        _log.warning("%s died; started again, %d of %d in an hour", rank, *counts)
        await self._group.wait_for_process(k, limits.startup_timeout_s)
        args = (self._spec, k, first_group, share_array)
        await self._group.build_one(k, CollectorWorker, args, limits.startup_timeout_s)
        await self.call(k, "connect", *self._connections[k])
        node = await self._group.find_node(k, limits.call_timeout_s)
        if node != self._nodes[k]:
            self._nodes[k] = node
            _log.warning("%s is gone with its node; it goes on as %s", rank, self._group.ranks[k])

    async def _wait_until_gone(self, k: int) -> None:
        """Return once Ray has lost the collector's node and finds no room for it elsewhere."""
        while await self._is_node_there(k):
            await asyncio.sleep(NODE_POLL_S)
        if await find_room([self._slots[k]], ROOM_S):
            await asyncio.Event().wait()  # Ray starts its process there.

    async def _is_node_there(self, k: int) -> bool:
        return self._nodes[k] in [node.id for node in await asyncio.to_thread(list_alive_nodes)]


class RemoteCollector:
    """One collector; implements rollout.collector.CollectorCalls."""

    def __init__(self, group: CollectorGroup, number: int) -> None:
        self._group = group
        self._number = number

    async def submit(self, commands: CollectorCommands) -> None:
        await self._call("submit", commands)

    async def poll_events(self, wait_s: float, gather_s: float) -> CollectorEvents:
        deadline_s = wait_s + gather_s + self._group.call_timeout_s
        with _tell_loss():
            return await self._group.poll_events(self._number, wait_s, gather_s, deadline_s)

    async def hold(self, session: int, cut_off: bool) -> int:
        return await self._call("hold", session, cut_off, deadline_s=self._group.hold_timeout_s)

    async def resume(self, session: int) -> None:
        await self._call("resume", session)

    async def idle_seconds(self) -> float:
        return await self._call("idle_seconds")

    async def restart(self, first_group: int) -> bool:
        with _tell_loss():
            return await self._group.restart(self._number, first_group)

    async def _call(self, method: str, *args: object, deadline_s: float | None = None) -> Any:
        with _tell_loss():
            return await self._group.call(self._number, method, *args, deadline_s=deadline_s)


@contextmanager
def _tell_loss() -> Iterator[None]:
    """Raise CollectorLostError for a process that is gone."""
    try:
        yield
    except RankDiedError as error:
        raise CollectorLostError(str(error)) from None


def _split_by_store(
    samples: Sequence[StoredSample],
) -> tuple[dict[int, tuple[list[int], list[int]]], list[int]]:
    """Return (group_N and index_N by store, the place of each sample in the stores' answers)."""
    parts: dict[int, tuple[list[int], list[int]]] = {}
    places: dict[int, list[int]] = {}
    for i, sample in enumerate(samples):
        group_N, index_N = parts.setdefault(sample.lease.store, ([], []))
        group_N.append(sample.lease.group)
        index_N.append(sample.sample_index)
        places.setdefault(sample.lease.store, []).append(i)
    order = [0] * len(samples)
    for position, i in enumerate(i for of_store in places.values() for i in of_store):
        order[i] = position
    return parts, order
