"""Stands for trainer, critic, links and parity check: each call takes the predicted seconds."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from mcore_rl.run.roles.parity_check import ParityReport
from mcore_rl.run.roles.parity_tolerance import EngineDifference
from mcore_rl.tools.simulate.costs import Images, Lengths, TrainCosts
from mcore_rl.tools.simulate.engine import SimulatedEngine
from mcore_rl.types import (
    LogprobOptions,
    StepStats,
    StoredBatch,
    StoredColumn,
    TokenScores,
    TrainBatch,
    WeightVersion,
)
from mcore_rl.weight_sync.controller.linked_engine import is_read_back
from mcore_rl.weight_sync.controller.sync_report import EngineSyncResult, SyncReport

Spend = Callable[[str, Callable[[], float]], None]
"""Lets the predicted seconds pass, in which ranks do what the name says."""


class SimulatedRanks:
    """Implements run.roles.trainer.RankCalls, CriticCalls and run.roles.colocation.Model."""

    def __init__(self, role: str, costs: TrainCosts, spend: Spend) -> None:
        self._role = role
        self._costs = costs
        self._spend = spend
        self._moved: set[str] = {"weights", "training"}
        self.busy_s = 0.0
        self.saved: dict[str, Any] = {}
        """State that the newest save keeps."""

    def compute_logprobs(
        self, per_dp: Sequence[StoredBatch], options: LogprobOptions
    ) -> list[list[TokenScores[StoredColumn]]]:
        self._work("log-probs", self._costs.forward_s, per_dp)
        name = "ref_logprobs" if options.reference else "old_logprobs"
        return [[TokenScores(StoredColumn(name))]]

    def compute_values(self, per_dp: Sequence[StoredBatch]) -> list[list[StoredColumn]]:
        self._work("values", self._costs.forward_s, per_dp)
        return [[StoredColumn("values")]]

    def train_step(
        self, per_dp: Sequence[StoredBatch], *, num_tokens: int, temperature: float = 1.0
    ) -> StepStats:
        del temperature
        self._work("step", self._costs.step_s, per_dp)
        return StepStats(0.0, 0.0, 0.0, num_tokens)

    def save(self, folder: str, extra: dict[str, Any]) -> None:
        """Take the seconds of a copy to host memory; what writes it works beside the steps."""
        del folder
        self._spend(f"{self._role} save", lambda: self._costs.save_s)
        self.saved = dict(extra)

    def finish_save(self) -> None:
        """Do nothing: the time of writing is not simulated."""

    def hold_seconds(self, parts: Collection[str]) -> float:
        """Return the seconds to move to or from the GPU what `parts` changes, and note it."""
        moved = self._moved ^ set(parts)
        self._moved = set(parts)
        state = self._costs.state
        sizes = {"weights": state.weights, "training": state.training}
        return sum(self._costs.offload_s(sizes[part]) for part in moved)

    def _work(
        self,
        name: str,
        predict: Callable[[Lengths, Images], float],
        per_dp: Sequence[StoredBatch],
    ) -> None:
        def seconds() -> float:
            most_tokens = max(sum(share.lens_N) for share in per_dp)
            seconds = predict(_lens(per_dp), _images(per_dp)) + self._costs.read_s(most_tokens)
            self.busy_s += seconds
            return seconds

        self._spend(f"{self._role} {name}", seconds)


def _lens(per_dp: Sequence[StoredBatch]) -> list[list[list[int]]]:
    """Return the lengths of sequences by coordinate and micro-batch; a filler has one token."""
    lens_by_coordinate = []
    for share in per_dp:
        rest = iter(share.lens_N)
        lens_by_coordinate.append([[next(rest) for _ in range(num)] or [1] for num in share.parts])
    return lens_by_coordinate


def _images(per_dp: Sequence[StoredBatch]) -> list[list[int]]:
    """Return the distinct images of each micro-batch if each prompt has one; a filler has none."""
    by_coordinate = []
    for share in per_dp:
        prompts = zip(share.store_N.tolist(), share.group_N.tolist(), strict=True)
        rest = iter(list(prompts))
        by_coordinate.append([len({next(rest) for _ in range(num)}) for num in share.parts])
    return by_coordinate


TRACE_S = 2.0
"""Seconds in which an engine traces its loader and both sides plan: DeepSeek-V3's 44,544 tensors of
experts take 2.0 s (benchmarks/link.py).
"""
MEET_S = 32e-6
"""Seconds of the controller for each rank of each link (benchmarks/link.py --ranks)."""
JOIN_S = 0.25e-3
"""Seconds of each trainer rank for each of sixteen links, its only plan included."""


def link_seconds_of(ranks_per_link: int) -> Callable[[int], float]:
    """Return a function: how many seconds it takes to link so many engines at once.

    ranks_per_link   trainer ranks, and ranks of an engine
    """
    per_engine_s = MEET_S * ranks_per_link + JOIN_S
    return lambda num_engines: TRACE_S + per_engine_s * num_engines


class SimulatedLinks:
    """Sends weights in the seconds that the sync's plan predicts.

    Implements run.roles.weight_sync.WeightLinks.
    """

    def __init__(
        self,
        engines: Mapping[str, SimulatedEngine],
        sync_s: float,
        swap_s: float,
        num_bytes: int,
        *,
        staged: bool,
        link_s: Callable[[int], float],
        send: Callable[[float], Awaitable[None]] = asyncio.sleep,
        waits: bool = False,
        read_back_s: float = 0.0,
        verify_every: int = 0,
    ) -> None:
        """`num_bytes` reach each engine; `staged` engines go on until they swap for `swap_s`.

        link_s  seconds to link so many engines at once
        send    lets seconds pass in which the trainer sends
        waits   a sync also waits for the decode steps that are under way
        read_back_s   by which a pause is longer if a sync is read back
        verify_every  which syncs of a link are (linked_engine.is_read_back)
        """
        self._engines = engines
        self._sync_s = sync_s
        self._swap_s = swap_s
        self._num_bytes = num_bytes
        self._staged = staged
        self._link_s = link_s
        self._send = send
        self._waits = waits
        self._read_back_s = read_back_s
        self._verify_every = verify_every
        self._num_syncs: dict[str, int] = {}
        self._versions: dict[str, int] = {}

    @property
    def linked(self) -> tuple[str, ...]:
        return tuple(self._versions)

    @property
    def in_rotation(self) -> tuple[str, ...]:
        newest = max(self._versions.values(), default=0)
        return tuple(url for url, version in self._versions.items() if version == newest)

    def forget_links(self) -> None:
        self._versions.clear()

    def unlink(self, url: str) -> None:
        self._versions.pop(url, None)

    async def connect(self, urls: Sequence[str]) -> None:
        await asyncio.sleep(self._link_s(len(urls)))
        self._versions |= dict.fromkeys(urls, -1)
        self._num_syncs |= dict.fromkeys(urls, 0)

    async def sync(self, version: int, urls: Sequence[str] | None = None) -> SyncReport:
        to = list(urls or self._versions)
        if not self._staged:
            self._pause(to)
        await self._send(self._sync_s)
        if self._waits:
            await asyncio.gather(*(self._engines[url].between_steps() for url in to))
        self._pause(to)
        read_back = [
            url for url in to if is_read_back(self._num_syncs.get(url, 0), self._verify_every)
        ]
        await asyncio.sleep(self._swap_s)
        self._resume(version, [url for url in to if url not in read_back])
        read_back_s = self._read_back_s if read_back else 0.0
        await asyncio.sleep(read_back_s)
        self._resume(version, read_back)
        paused_s = self._swap_s if self._staged else self._sync_s + self._swap_s
        results = (
            EngineSyncResult(
                url,
                num_bytes=self._num_bytes,
                transfer_seconds=self._sync_s,
                pause_seconds=paused_s + (read_back_s if url in read_back else 0.0),
                verified=url in read_back,
            )
            for url in to
        )
        return SyncReport(version, self._sync_s + self._swap_s + read_back_s, tuple(results))

    def _pause(self, urls: Sequence[str]) -> None:
        for url in urls:
            self._engines[url].pause()

    def _resume(self, version: int, urls: Sequence[str]) -> None:
        for url in urls:
            self._engines[url].resume(WeightVersion(version))
            self._versions[url] = version
            self._num_syncs[url] = self._num_syncs.get(url, 0) + 1


class SimulatedParityCheck:
    """Finds that all engines agree, after the time that it takes to ask them."""

    def __init__(
        self,
        spend: Spend,
        seconds: float,
        busy: Mapping[str, SimulatedEngine] | None = None,
    ) -> None:
        """`seconds` take the trainer, and then the engines: beside their other work, or if they
        are `busy` with it, between their steps.
        """
        self._spend = spend
        self._seconds = seconds
        self._busy = busy

    def score_samples(self, version: WeightVersion, batch: StoredBatch) -> None:
        del version, batch
        self._spend("parity check", lambda: self._seconds)

    def score_sequences(self, version: WeightVersion, batch: TrainBatch) -> None:
        del version, batch
        self._spend("parity check", lambda: self._seconds)

    async def check(self, urls: Sequence[str], verified: Collection[str] = ()) -> ParityReport:
        del verified
        if self._busy is None:
            await asyncio.sleep(self._seconds)
        else:
            await asyncio.gather(*(self._busy[url].score(self._seconds) for url in urls))
        return ParityReport(dict.fromkeys(urls, EngineDifference(0.0, 0.0, 0.0, 0)))


class WaitingEngines(Protocol):
    """Engines that wait for the GPUs of ranks; see placement.Failures."""

    async def seat_lost(self) -> bool: ...

    async def start_lost(self) -> None: ...


class SimulatedEngineMemory:
    """GPU memory of engines, which on shared GPUs takes time to give up and to take back.

    Does what run.roles.colocation.EngineMemory does; their weights come with a sync, not from host
    memory.
    """

    def __init__(
        self, *, are_colocated: bool, call_s: float, engines: WaitingEngines | None = None
    ) -> None:
        """`engines`: those that start again in turn with the ranks when they are lost."""
        self._engines = engines
        self.are_colocated = are_colocated
        self._call_s = call_s if are_colocated else 0.0

    async def seat_lost(self) -> bool:
        return self._engines is not None and await self._engines.seat_lost()

    async def start_lost(self) -> None:
        assert self._engines is not None, "engines were seated"
        await self._engines.start_lost()

    async def for_training(self) -> None:
        await asyncio.sleep(self._call_s)

    async def for_scoring(self) -> None:
        await asyncio.sleep(self._call_s)

    async def for_sync(self) -> None:
        await asyncio.sleep(self._call_s)

    async def for_rollout(self) -> None:
        await asyncio.sleep(self._call_s)

    async def restore(self) -> None:
        await asyncio.sleep(self._call_s)


class SimulatedModel:
    """The ranks of a model that gives up GPU memory; implements run.roles.colocation.Model."""

    def __init__(self, ranks: SimulatedRanks) -> None:
        self._ranks = ranks

    async def hold(self, parts: Collection[str]) -> None:
        await asyncio.sleep(self._ranks.hold_seconds(parts))
