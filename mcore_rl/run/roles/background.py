"""Samples while the trainer trains: turns prompts into finished groups within a staleness bound.

                 room for one more?         every sample done         a step takes P groups
    prompts --begin--> group, born at version v --> scored by rewards --> buffer --------> loop
       ^                     |                                                |
       +--- begun again -----+---- engines lost, or too stale (stale=drop) ---+

The sampler runs on the run's event loop. The loop's thread calls `take`, and calls `pause_for_sync`
and `resume` around each weight sync. The sampler never calls the trainer's ranks, which may be
training: a lost engine returns with the next sync, or while a step waits for samples.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Self

from mcore_rl.config import RolloutConfig
from mcore_rl.logs.episode_log import ABORTED, DROPPED_STALE, EpisodeLog, list_reasons
from mcore_rl.logs.ledger.ledger import EQUAL_REWARDS, LOST, RunLedger
from mcore_rl.logs.progress import count_in_stage
from mcore_rl.loops.outcomes import RewardFailures
from mcore_rl.loops.roles import ScoreLater, Watched
from mcore_rl.loops.sampling import SamplingOptions
from mcore_rl.process.clock import now_s
from mcore_rl.process.lost_samples import SamplesLostError
from mcore_rl.rollout.sampling_client import SamplingClient, SamplingSession
from mcore_rl.rollout.transport import RolloutError
from mcore_rl.run.roles.finished_groups import SampleGroup
from mcore_rl.run.roles.generator import count_drawn, make_sampling
from mcore_rl.run.roles.groups import OpenPrompts, make_buffer
from mcore_rl.run.roles.kept_samples import FinishedGroup, KeptSamples
from mcore_rl.types import Prompt, StoredSample, WeightVersion
from mcore_rl.types.scores import Scores, join_scores

_log = logging.getLogger(__name__)
POLL_S = 1.0
"""How often a waiting step checks whether sampling has failed."""
SEEDS_PER_RUN = 1_000_003
"""The distance between the seeds of two runs; positions of prompts are smaller."""


class BackgroundSampler:
    """Draws samples while its `with` block runs; implements roles.Background."""

    _session: SamplingSession
    _num_sampling = 0
    """Groups that wait for samples, not for scores."""
    _num_losses = 0
    """Losses of collectors whose groups have begun again."""

    def __init__(
        self,
        options: SamplingOptions,
        seed: int,
        version: WeightVersion,
        prompts: OpenPrompts,
        client: SamplingClient,
        reward: ScoreLater,
        watched: Watched,
        start: Callable[[Awaitable[None]], "Future[None]"],
        revive: Callable[[], Awaitable[bool]],
        episodes: EpisodeLog | None = None,
        ledger: RunLedger | None = None,
        kept: KeptSamples | None = None,
    ) -> None:
        """`version`: the weights that the engines serve; `seed`: run.seed.

        start         starts a coroutine and returns at once; engines are watched meanwhile
        revive        if no engine serves, brings the current weights to one that is starting again;
                      returns False if no engine is
        episodes      logs which groups begin, and why their episodes end
        ledger        gets prompts that begin again, and those that are replaced
        kept          finished groups of an earlier launch, and where to keep those of this one
        """
        self._options = options
        self._rollout = options.rollout
        self._seed = seed * SEEDS_PER_RUN
        self._prompts = prompts
        self._client = client
        self._reward = reward
        self._watched = watched
        self._start = start
        self._revive = revive
        self._episodes = episodes or EpisodeLog()
        self._ledger = ledger or RunLedger()
        self._kept = kept
        self._buffer = make_buffer(self._rollout, version, self._episodes)
        self._tasks: dict[SampleGroup, asyncio.Task[None]] = {}
        self._requeued: deque[tuple[int, Prompt]] = deque()
        """Positions and prompts whose samples were lost or dropped; they begin first."""
        self._passed: deque[SampleGroup] = deque()
        """Groups that have begun, to keep the order beside kept ones, and are not sampled yet."""
        self._failures = SamplingFailures()
        """No group begins from a failure to the next recovery."""
        self._stats = SamplingStats()
        # Any change sets both events. Each event has one waiter, which clears it.
        self._may_begin = asyncio.Event()
        self._may_take = asyncio.Event()

    def __enter__(self) -> Self:
        self._running = self._start(self._run())
        return self

    def __exit__(self, *exception: object) -> None:
        self._running.cancel()
        self._buffer.close()

    def take(self, version: WeightVersion) -> tuple[list[StoredSample], Scores, dict[str, float]]:
        """Wait for the groups of a step; return their samples, their scores and metrics.

        Raises the error that ended the sampling, if any. Raises RewardFailureError if more rewards
        failed since the last step than the recipe allows.
        """
        with count_in_stage(count_drawn(self._client)):
            groups, metrics = self._watched(self._take(version))
        samples = [sample for group in groups for sample in group.samples]
        return samples, join_scores([group.scores for group in groups]), metrics

    def pause_for_sync(self) -> None:
        """Finish, abort or leave half-done responses before weights change (rollout.partial)."""
        if self._rollout.mode == "one_step_off":
            self._watched(self._finish_sampling())
        elif self._rollout.partial != "continue":
            self._watched(self._session.hold(cut_off=self._rollout.partial == "restart"))

    def resume(self, version: WeightVersion) -> dict[str, float]:
        """Go on after a sync: the engines serve `version` from here on."""
        self._watched(self._resume(version))
        return {"staleness/restarted": float(self._session.num_cut_off)}

    def keep(self, step: int) -> None:
        """Keep finished groups with the checkpoint of `step`, whose weights the engines serve."""
        if self._kept is not None:
            self._watched(self._keep(self._kept, step))

    async def _keep(self, kept: KeptSamples, step: int) -> None:
        await kept.write(step, self._buffer.list_finished())

    async def _run(self) -> None:
        """Begin groups as long as there is room; never return."""
        if self._kept is not None:
            self._take_kept(await self._kept.read())
        try:
            async with (
                self._client.open(self._rollout.max_in_flight, self._notify) as self._session,
                asyncio.TaskGroup() as tasks,
            ):
                while True:
                    self._may_begin.clear()
                    while self._has_room():
                        group = self._begin()
                        self._tasks[group] = tasks.create_task(self._complete(group))
                        self._num_sampling += 1
                        await asyncio.sleep(0)  # The group sends its requests, which then count.
                    await self._may_begin.wait()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    def _has_room(self) -> bool:
        if self._failures.error is not None or self._session.is_held:
            return False
        if not self._passed and self._buffer.room() <= 0:
            return False
        group_size = self._rollout.samples_per_prompt
        most = self._rollout.max_in_flight or max(self._client.max_in_flight, group_size)
        return self._session.num_open + group_size <= most

    def _begin(self) -> SampleGroup:
        if self._passed:
            return self._passed.popleft()
        if self._requeued:
            position, prompt = self._requeued.popleft()
            self._ledger.note_again(position)
        else:
            position, prompt = self._prompts.begin()
        return self._buffer.begin(position, prompt)

    def _take_kept(self, kept: Mapping[int, FinishedGroup]) -> None:
        """Finish the groups of prompts whose samples an earlier launch has kept."""
        left = dict(kept)
        position = -1
        while left and position < max(left):
            position, prompt = self._prompts.begin()
            group = self._buffer.begin(position, prompt)
            found = left.pop(position, None)
            if found is None or found.samples[0].prompt.token_ids != prompt.token_ids:
                self._passed.append(group)
            else:
                self._ledger.note_sampled(found.samples)
                self._ledger.note_scored(found.samples, found.scores)
                self._buffer.finish(group, found.samples, found.scores)
        self._notify()

    def _requeue(self, group: SampleGroup, reason: str = ABORTED, why: str = "") -> None:
        """Begin a prompt again. `why`: for the ledger, if it is not the end of the episodes."""
        self._buffer.remove(group, reason)
        if group in self._passed:
            self._passed.remove(group)
        self._requeued.append((group.position, group.prompt))
        self._ledger.give_up(group.position, why or reason)

    async def _complete(self, group: SampleGroup) -> None:
        """Sample and score a group, then keep it for a step, replace it or requeue its prompt."""
        begun_after = self._failures.num_recoveries
        try:
            samples, greedy = await self._sample(group)
            scores = await self._reward(samples)
            baselines = await self._reward(greedy) if greedy else None
        except RolloutError as error:
            self._failures.note(error, begun_after)
            self._requeue(group)
            return
        except SamplesLostError as lost:
            _log.warning("%s; prompt %d is sampled again", lost, group.prompt.index)
            self._lose(group)
            return
        finally:
            del self._tasks[group]
            self._notify()
        self._prompts.note_scores([group.prompt], scores)
        if baselines is not None:
            scores = scores.with_baselines(baselines)
        self._stats.note(samples, scores)
        if self._stats.is_replaced(scores, self._options):
            self._buffer.remove(group, list_reasons(samples))
            self._prompts.end([group.position])
            self._ledger.reject(group.position, EQUAL_REWARDS)
        elif self._client.is_lost(samples[0]):  # since they were scored
            self._lose(group)
        else:
            self._buffer.finish(group, samples, scores)

    async def _sample(self, group: SampleGroup) -> tuple[list[StoredSample], list[StoredSample]]:
        """Return the samples of a group, and its greedy sample where advantages need it."""
        seed = self._seed + group.position
        num_samples = self._rollout.samples_per_prompt
        sampling = make_sampling(self._rollout, greedy=False, seed=seed)
        greedy: list[StoredSample] = []
        try:
            samples = await self._session.generate([group.prompt], num_samples, sampling)
            if self._options.with_greedy:
                greedy_sampling = make_sampling(self._rollout, greedy=True, seed=seed)
                with self._episodes.record([group.prompt], 1, greedy=True) as greedy:
                    greedy += await self._session.generate([group.prompt], 1, greedy_sampling)
        finally:
            self._num_sampling -= 1
            self._notify()
        self._failures.note_success()
        return samples, greedy

    async def _take(self, version: WeightVersion) -> tuple[list[SampleGroup], dict[str, float]]:
        buffer = self._buffer
        assert buffer.version == version, (buffer.version, version)
        buffer.begin_step()
        if self._rollout.stale == "drop":
            self._drop_late()
        while True:
            self._may_take.clear()
            if self._running.done():
                self._running.result()
            self._drop_lost()
            groups = buffer.choose()
            if groups is not None:
                break
            if self._failures.error is not None:
                await self._recover(self._failures.error)
            assert buffer.num_unfinished or buffer.room() > 0, (
                "a step waits for groups, but none will come"
            )
            await self._wait_for_change()
        self._stats.failures.check(self._options.reward, f"step {version + 1}")
        self._prompts.end([group.position for group in groups])
        self._notify()
        metrics = {
            **self._stats.metrics(self._rollout),
            "buffer/finished": float(buffer.num_finished),
            "buffer/unfinished": float(buffer.num_unfinished),
        }
        self._stats = SamplingStats()
        return groups, metrics

    def _drop_late(self) -> None:
        for group in self._buffer.late():
            if group in self._tasks:
                self._tasks[group].cancel()
            self._requeue(group, DROPPED_STALE)
            self._stats.num_dropped += self._rollout.samples_per_prompt
            self._notify()

    def _drop_lost(self) -> None:
        """Requeue finished groups whose samples were lost with their collector."""
        if self._num_losses == self._client.num_losses:
            return
        self._num_losses = self._client.num_losses
        for group in self._buffer.list_finished():
            if self._client.is_lost(group.samples[0]):
                self._lose(group)
                self._notify()

    def _lose(self, group: SampleGroup) -> None:
        self._stats.num_lost += self._rollout.samples_per_prompt
        self._requeue(group, why=LOST)

    async def _recover(self, error: RolloutError) -> None:
        """Let groups begin again after a failure.

        From the second failure in a row on, an engine must first return with the current weights.
        Raises `error` if no engine does.
        """
        if self._failures.num_in_row > 1 and not await self._revive():
            raise error
        _log.warning("%s; %d prompts are sampled again", error, len(self._requeued))
        self._failures.recover()
        self._notify()

    async def _finish_sampling(self) -> None:
        """Wait until all groups that there is room for are sampled, including replacements."""
        while self._is_sampling() or self._has_room():
            if self._failures.error is not None or self._running.done():
                return
            self._may_take.clear()
            await self._wait_for_change()

    def _is_sampling(self) -> bool:
        """Return whether samples are being drawn, or may be, as scores may ask for replacements."""
        return bool(self._tasks) if self._rollout.dynamic_sampling else self._num_sampling > 0

    async def _wait_for_change(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._may_take.wait(), POLL_S)

    async def _resume(self, version: WeightVersion) -> None:
        self._buffer.version = version
        self._failures.recover()
        await self._session.resume()
        self._notify()

    def _notify(self) -> None:
        self._may_begin.set()
        self._may_take.set()


class SamplingStats:
    """Counts samples since the last step took its groups; each step starts with a new object.

    failures      samples whose reward failed
    num_silent    groups without signal, which dynamic sampling replaces
    num_dropped   samples that were dropped because they were too stale
    num_lost      complete samples that were lost with their collector and are sampled again
    """

    def __init__(self) -> None:
        self._began_s = now_s()
        self._num_groups = 0
        self._num_samples = 0
        self._num_tokens = 0
        self._rewards: list[float] = []
        self.failures = RewardFailures()
        self.num_silent = 0
        self.num_dropped = 0
        self.num_lost = 0

    def note(self, samples: Sequence[StoredSample], scores: Scores) -> None:
        """Count a finished group."""
        self._num_groups += 1
        self._num_samples += len(samples)
        self._num_tokens += sum(sample.response_len for sample in samples)
        self._rewards += scores.outcomes()
        self.failures.note(scores)

    def is_replaced(self, scores: Scores, options: SamplingOptions) -> bool:
        """Return whether to sample another group because this group has no signal.

        A step replaces at most as many groups as dynamic sampling resamples in max_rounds rounds.
        """
        rollout = options.rollout
        if not rollout.dynamic_sampling or options.groups_with_signal(scores):
            return False
        self.num_silent += 1
        return self.num_silent <= (rollout.max_rounds - 1) * rollout.prompts_per_step

    def metrics(self, rollout: RolloutConfig) -> dict[str, float]:
        """Return the metrics so far; metrics of dynamic sampling only if the recipe has it."""
        seconds = now_s() - self._began_s
        metrics = {
            "rollout/tokens_per_second": self._num_tokens / seconds,
            "staleness/dropped": float(self.num_dropped),
            "rollout/lost": float(self.num_lost),
            **self.failures.metrics(),
        }
        if rollout.dynamic_sampling:
            metrics |= {
                "sampling/samples": float(self._num_samples),
                "sampling/kept_share": 1 - self.num_silent / max(self._num_groups, 1),
                "sampling/reward_mean": sum(self._rewards) / max(len(self._rewards), 1),
            }
        return metrics


class SamplingFailures:
    """Keeps the error since the last recovery and counts the failures in a row.

    A lost engine makes many groups fail, some of them late. All failures of groups that began after
    the same recovery count as one.
    """

    def __init__(self) -> None:
        self.error: RolloutError | None = None
        """Why the engines could not sample; None from a recovery to the next failure."""
        self.num_in_row = 0
        """Failures without a group that was sampled in between."""
        self.num_recoveries = 0

    def note(self, error: RolloutError, begun_after: int) -> None:
        """Keep the error of a group that began when `num_recoveries` was `begun_after`."""
        if begun_after == self.num_recoveries:
            self.num_in_row += self.error is None
            self.error = error

    def note_success(self) -> None:
        self.num_in_row = 0

    def recover(self) -> None:
        """Forget the error, and count the recovery."""
        self.error = None
        self.num_recoveries += 1
