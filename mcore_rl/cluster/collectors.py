"""Runs a collector on each node that has engines, and stands for all of them in the controller."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_rl.cluster.collector_worker import CollectorSpec, CollectorWorker, TokenWork
from mcore_rl.cluster.group import RankGroup
from mcore_rl.cluster.placement import Slot
from mcore_rl.cluster.stores import StoreHandles
from mcore_rl.rollout.collector import CollectorNews, Orders
from mcore_rl.rollout.engine_spec import EngineAddress
from mcore_rl.rollout.served_endpoint import ServedEndpoint
from mcore_rl.types import Sample, Scores, StoredBatch, StoredSample

THREADS = 64
"""Calls that a collector answers at once; a long poll and each read take one."""


class CollectorGroup:
    """The collectors of a run, one per node that has engines of the policy."""

    def __init__(
        self,
        engine_slots: Sequence[Sequence[Slot]],
        log_dir: Path,
        call_timeout_s: float,
        hold_timeout_s: float,
    ) -> None:
        """Start the processes, without waiting for them.

        engine_slots     the slots of each engine; a collector sits beside the first of a node
        hold_timeout_s   for requests under way to end
        """
        nodes: dict[str, Slot] = {}
        for slots in engine_slots:
            nodes.setdefault(slots[0].node, replace(slots[0], bundle={"CPU": 0}))
        names = list(nodes)
        self._home = [names.index(slots[0].node) for slots in engine_slots]
        self._group = RankGroup("collector", list(nodes.values()), log_dir, threads=THREADS)
        self._call_timeout_s = call_timeout_s
        self._hold_timeout_s = hold_timeout_s
        self._building: Any = None
        self.stores = StoreHandles(self._group.actors, call_timeout_s)

    def start_build(self, spec: CollectorSpec, timeout_s: float) -> None:
        args = [(spec,)] * len(self._group.ranks)
        self._building = self._group.start_build(CollectorWorker, args, timeout_s)

    def connect(
        self, engines: Sequence[EngineAddress], served: Mapping[str, ServedEndpoint]
    ) -> None:
        """Wait until the collectors are built; tell them their engines and the served models."""
        self._group.finish(self._building)
        by_node = [
            [e.url for e, home in zip(engines, self._home, strict=True) if home == k]
            for k in range(len(self._group.ranks))
        ]
        args = [(tuple(engines), urls, dict(served), self.stores) for urls in by_node]
        self._group.call_each("connect", args, deadline_s=self._call_timeout_s)

    @property
    def engines_per_collector(self) -> list[int]:
        return [self._home.count(k) for k in range(len(self._group.ranks))]

    def calls(self) -> list["RemoteCollector"]:
        """Return the collectors; they play rollout.collector.CollectorCalls."""
        return [
            RemoteCollector(self._group, k, self._call_timeout_s, self._hold_timeout_s)
            for k in range(len(self._group.ranks))
        ]

    def first_of_nodes(self) -> dict[str, Any]:
        """See RankGroup.first_of_nodes."""
        return self._group.first_of_nodes()

    async def watch(self) -> None:
        """Never return; raise RankError once a collector's process is gone."""
        await self._group.watch()

    async def score(self, samples: Sequence[StoredSample]) -> Scores:
        """Return the rewards of samples, in their order."""
        parts, order = _by_store(samples)
        calls = (self._call(store, "score", *where) for store, where in parts.items())
        scores = Scores([])
        for part in await asyncio.gather(*calls):
            scores = scores.joined(part)
        return scores if len(parts) == 1 else scores.select(order)

    async def ask_teacher(self, samples: Sequence[StoredSample]) -> None:
        """Have the stores keep the teacher's log-probs of samples."""
        parts, _ = _by_store(samples)
        calls = (self._call(store, "ask_teacher", *where) for store, where in parts.items())
        await asyncio.gather(*calls)

    async def samples(self, samples: Sequence[StoredSample]) -> list[Sample]:
        """Bring samples here, in their order."""
        parts, order = _by_store(samples)
        calls = (self._call(store, "samples", *where) for store, where in parts.items())
        found = [sample for part in await asyncio.gather(*calls) for sample in part]
        return [found[i] for i in order]

    async def apply(
        self, function: TokenWork, batch: StoredBatch
    ) -> tuple[StoredBatch, dict[str, float]]:
        """Return the batch with the fields that `function` sets, where its tokens are."""
        columns, metrics = await self._call(0, "apply", function, batch)
        return replace(batch, **columns), metrics

    def close(self) -> None:
        """End what the collectors started themselves."""
        self._group.call_all("close", deadline_s=self._call_timeout_s)

    async def _call(self, k: int, method: str, *args: object) -> Any:
        deadline_s = self._call_timeout_s
        return await self._group.call_one_async(k, method, *args, deadline_s=deadline_s)


class RemoteCollector:
    """One collector; plays rollout.collector.CollectorCalls."""

    def __init__(
        self, group: RankGroup, index: int, call_timeout_s: float, hold_timeout_s: float
    ) -> None:
        self._group = group
        self._index = index
        self._call_timeout_s = call_timeout_s
        self._hold_timeout_s = hold_timeout_s

    async def obey(self, orders: Orders) -> None:
        await self._call("obey", orders)

    async def news(self, wait_s: float, gather_s: float) -> CollectorNews:
        return await self._call("news", wait_s, gather_s)

    async def hold(self, session: int, cut_off: bool) -> int:
        deadline_s = self._hold_timeout_s
        return await self._group.call_one_async(
            self._index, "hold", session, cut_off, deadline_s=deadline_s
        )

    async def resume(self, session: int) -> None:
        await self._call("resume", session)

    async def idle_seconds(self) -> float:
        return await self._call("idle_seconds")

    async def _call(self, method: str, *args: object) -> Any:
        return await self._group.call_one_async(
            self._index, method, *args, deadline_s=self._call_timeout_s
        )


def _by_store(
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
