"""Sampling beside training: prompts in, finished groups out, within a bound of staleness.

                       room for one more?           every sample done             a step takes P groups
    prompts --begin--> group, born at version v --> scored in a thread --> buffer ------------------> loop
       ^                     |                                                |
       +--- begun again -----+---- engines lost, or too stale (stale=drop) ---+

All of this runs on the run's event loop; the loop's thread calls `take`, and `pause_for_sync` and `resume` around each
change of weights. While ranks train nothing here may touch them: an engine that was lost comes back with the
next sync, or while a step waits for samples.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol, Self

from mcore_rl.algo.choice import needs_of
from mcore_rl.config import Config
from mcore_rl.loops.sampling import groups_with_signal
from mcore_rl.players.generator import make_sampling
from mcore_rl.players.groups import Group, GroupBuffer
from mcore_rl.players.sampling_stats import SamplingStats
from mcore_rl.rewards.in_thread import in_thread
from mcore_rl.roles import Reward, Watched
from mcore_rl.rollout.client import RolloutClient, RolloutError, RolloutSession
from mcore_rl.types import Prompt, Sample, Scores, WeightVersion

_log = logging.getLogger(__name__)
LOOK_S = 1.0
"""How often a step that waits for samples looks whether sampling still goes on."""
SEEDS_PER_RUN = 1_000_003
"""Between the seeds of two runs, which no prompt's position reaches."""


class OpenPrompts(Protocol):
    """Prompts that are known to be under way until they are ended."""

    def begin(self) -> tuple[int, Prompt]: ...

    def end(self, positions: Sequence[int]) -> None: ...


class BackgroundSampler:
    """`with BackgroundSampler(...) as background:` samples from here on. Played as roles.Background."""

    _session: RolloutSession

    def __init__(
        self,
        config: Config,
        version: WeightVersion,
        prompts: OpenPrompts,
        client: RolloutClient,
        reward: Reward,
        watched: Watched[Any],
        start: Callable[[Awaitable[None]], "Future[None]"],
        revive: Callable[[], Awaitable[bool]],
    ) -> None:
        """`version`: what the engines serve. `start`: begins what runs beside `watched`, engines watched too.
        `revive`: brings the present weights to an engine if none serves; False if none will.
        """
        rollout = config.rollout
        self._rollout, self._seed = config.rollout, config.run.seed * SEEDS_PER_RUN
        self._prompts, self._client, self._reward = prompts, client, reward
        self._watched, self._start, self._revive = watched, start, revive
        self._buffer = GroupBuffer(
            rollout.prompts_per_step,
            rollout.staleness_bound,
            version,
            in_order=rollout.mode == "one_step_off",
            waits=rollout.stale == "wait",
        )
        self._with_greedy = needs_of(config.algorithm).greedy_baseline
        self._max_in_flight = rollout.max_in_flight or max(
            client.max_in_flight, rollout.samples_per_prompt
        )
        self._tasks: dict[Group, asyncio.Task[None]] = {}
        self._again: list[tuple[int, Prompt]] = []
        """Prompts whose samples were lost."""
        self._lost: RolloutError | None = None
        """Why; while it is there, nothing begins."""
        self._num_sampling = 0
        self._num_losses = 0
        """In a row, without a group that was sampled in between."""
        self._tally = SamplingStats()
        self._may_begin, self._may_take = asyncio.Event(), asyncio.Event()
        """Set when something changed; each has one that waits for it and clears it."""

    def __enter__(self) -> Self:
        self._running = self._start(self._run())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._running.cancel()

    def take(self, version: WeightVersion) -> tuple[list[Sample], Scores, dict[str, float]]:
        """Waits for enough groups; raises what ended the sampling, if it has ended."""
        groups, metrics = self._watched(self._take(version))
        scores = Scores([])
        for group in groups:
            scores = scores.joined(group.scores)
        return [sample for group in groups for sample in group.samples], scores, metrics

    def pause_for_sync(self) -> None:
        """Treat responses that are half done as the recipe says; they may be left to the new weights."""
        if self._rollout.mode == "one_step_off":
            self._watched(self._finish_sampling())
        elif self._rollout.partial != "continue":
            self._watched(self._session.hold(cut_off=self._rollout.partial == "restart"))

    def resume(self, version: WeightVersion) -> dict[str, float]:
        """The engines serve `version` from here on."""
        self._watched(self._go_on(version))
        return {"staleness/restarted": float(self._session.num_cut_off)}

    async def _run(self) -> None:
        try:
            async with (
                self._client.open(self._max_in_flight, self._tell) as self._session,
                asyncio.TaskGroup() as tasks,
            ):
                while True:
                    self._may_begin.clear()
                    while self._has_room():
                        group = self._begin()
                        self._tasks[group] = tasks.create_task(self._finish(group))
                        self._num_sampling += 1
                        await asyncio.sleep(0)  # its requests count from here on
                    await self._may_begin.wait()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    def _has_room(self) -> bool:
        if self._lost is not None or self._session.is_held or self._buffer.room() <= 0:
            return False
        return self._session.num_open + self._rollout.samples_per_prompt <= self._max_in_flight

    def _begin(self) -> Group:
        position, prompt = self._again.pop(0) if self._again else self._prompts.begin()
        return self._buffer.begin(position, prompt)

    def _begin_again(self, group: Group) -> None:
        self._buffer.remove(group)
        self._again.append((group.position, group.prompt))

    async def _finish(self, group: Group) -> None:
        """All samples of a group, and what they are worth."""
        try:
            samples, greedy = await self._sample(group)
            scores = await in_thread(lambda: self._score(samples, greedy))
        except RolloutError as error:
            self._num_losses += self._lost is None
            self._lost = error
            self._begin_again(group)
            return
        finally:
            del self._tasks[group]
            self._tell()
        self._tally.note(samples, scores)
        if self._rollout.dynamic_sampling and self._is_replaced(scores):
            self._buffer.remove(group)
            self._prompts.end([group.position])
        else:
            group.samples, group.scores = samples, scores

    async def _sample(self, group: Group) -> tuple[list[Sample], list[Sample]]:
        """The samples, and the greedy one where the advantages are made with it."""
        generate, seed = self._session.generate, self._seed + group.position
        sampled, greedily = (
            make_sampling(self._rollout, greedy=g, seed=seed) for g in (False, True)
        )
        try:
            samples = await generate([group.prompt], self._rollout.samples_per_prompt, sampled)
            greedy = await generate([group.prompt], 1, greedily) if self._with_greedy else []
        finally:
            self._num_sampling -= 1
            self._tell()
        self._num_losses = 0
        return samples, greedy

    def _score(self, samples: Sequence[Sample], greedy: Sequence[Sample]) -> Scores:
        scores = self._reward(samples)
        return (
            replace(scores, greedy_N=self._reward(greedy).rewards_N * len(samples))
            if greedy
            else scores
        )

    def _is_replaced(self, scores: Scores) -> bool:
        """Whether another group takes the place of this one; at most as many do as in max_rounds rounds."""
        options = self._rollout
        if groups_with_signal(scores.rewards_N, options.samples_per_prompt):
            return False
        self._tally.num_silent += 1
        return self._tally.num_silent <= (options.max_rounds - 1) * options.prompts_per_step

    async def _take(self, version: WeightVersion) -> tuple[list[Group], dict[str, float]]:
        buffer = self._buffer
        assert buffer.version == version, (buffer.version, version)
        while True:
            self._may_take.clear()
            if self._running.done():
                self._running.result()
            if self._rollout.stale == "drop":
                self._drop_late()
            if (groups := buffer.choose()) is not None:
                break
            if self._lost is not None:
                await self._recover(self._lost)
            assert buffer.num_unfinished or buffer.room() > 0, (
                "a step waits for groups, but none will come"
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._may_take.wait(), LOOK_S)
        self._prompts.end([group.position for group in groups])
        self._tell()
        metrics = {
            **self._tally.metrics(self._rollout),
            "buffer/finished": float(buffer.num_finished),
            "buffer/unfinished": float(buffer.num_unfinished),
        }
        self._tally = SamplingStats()
        return groups, metrics

    def _drop_late(self) -> None:
        for group in self._buffer.late():
            if group in self._tasks:
                self._tasks[group].cancel()
            self._begin_again(group)
            self._tally.num_dropped += self._rollout.samples_per_prompt
            self._tell()

    async def _recover(self, error: RolloutError) -> None:
        """Try again; the second time only if an engine that starts again was brought the present weights."""
        if self._num_losses > 1 and not await self._revive():
            raise error
        _log.warning("%s; %d prompts are sampled again", error, len(self._again))
        self._lost = None
        self._tell()

    async def _finish_sampling(self) -> None:
        """Of all groups that there is room for, those that take the place of others included."""
        while (self._is_sampling() or self._has_room()) and not (
            self._lost or self._running.done()
        ):
            self._may_take.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._may_take.wait(), LOOK_S)

    def _is_sampling(self) -> bool:
        """Or may have to: only its scores tell whether another group takes the place of one."""
        return bool(self._tasks) if self._rollout.dynamic_sampling else self._num_sampling > 0

    async def _go_on(self, version: WeightVersion) -> None:
        self._buffer.version, self._lost = version, None
        self._session.resume()
        self._tell()

    def _tell(self) -> None:
        self._may_begin.set()
        self._may_take.set()
