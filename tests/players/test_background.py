"""Background sampling on a fake engine: order, staleness, lost engines, replaced groups."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config import RolloutConfig
from mcore_rl.data.source import ShuffledStream
from mcore_rl.lost_samples import SamplesLost
from mcore_rl.metrics.episode_log import EpisodeLog
from mcore_rl.players.background import BackgroundSampler
from mcore_rl.players.groups import GroupBuffer
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.rollout import client as client_module
from mcore_rl.rollout.client import RolloutClient
from mcore_rl.rollout.transport import HttpOptions, RolloutError
from mcore_rl.scores import Scores
from mcore_rl.types import Prompt, Sample, WeightVersion
from tests.support.episode_rows import reasons_by_group
from tests.support.fake_sglang import FakeSGLang, loop_with_quick_retries

PROMPTS = [Prompt(i, (1, 2 + i), (), "unit", "") for i in range(40)]


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[EventLoop]:
    with loop_with_quick_retries(monkeypatch, client_module) as loop:
        yield loop


async def score_by_index(samples: Sequence[Sample]) -> Scores:
    """Even prompts have rewards that differ, odd ones do not."""
    return Scores([float(s.prompt.index % 2 == 0 and s.sample_index == 0) for s in samples])


class Sampler:
    """A background sampler with all that it calls."""

    def __init__(
        self,
        loop: EventLoop,
        *,
        with_greedy: bool = False,
        episodes: EpisodeLog | None = None,
        **options: Any,
    ) -> None:
        sizes = {"prompts_per_step": 2, "samples_per_prompt": 2, "max_response_len": 3}
        rollout = RolloutConfig(**{**sizes, "retries": 0, **options})
        self.engine = FakeSGLang(loop)
        self.prompts = ShuffledStream(PROMPTS, seed=0, shuffle=False)
        self.num_revived = 0
        self.can_revive = True
        self.background = BackgroundSampler(
            rollout,
            0,
            WeightVersion(0),
            self.prompts,
            RolloutClient([self.engine.address], rollout, HttpOptions.of(rollout, [9], str).open),
            score_by_index,
            loop.run,
            loop.start,
            self.revive,
            episodes,
            with_greedy=with_greedy,
        )

    async def revive(self) -> bool:
        self.num_revived += 1
        self.engine.answer = lambda body: None
        await asyncio.sleep(0)
        return self.can_revive

    def take(self, version: int) -> list[int]:
        """The prompts of the step, each once."""
        samples, scores, _ = self.background.take(WeightVersion(version))
        assert len(scores.rewards_N) == len(samples)
        return [sample.prompt.index for sample in samples[::2]]

    def move_to(self, version: int) -> None:
        self.background.pause_for_sync()
        self.engine.version = version
        self.background.resume(WeightVersion(version))

    def wait_until(self, holds: Callable[[GroupBuffer], bool]) -> None:
        """Wait until something holds for the groups that began and were not taken."""
        until_s = time.monotonic() + 30
        while not holds(self.background._buffer):
            assert time.monotonic() < until_s, "the sampler stands still"
            time.sleep(0.01)

    def wait_until_full(self) -> None:
        """Wait until no further group may begin, and all that began are finished."""
        self.wait_until(lambda groups: groups.room() <= 0 and not groups.num_unfinished)


def test_one_step_off_takes_every_prompt_in_order(loop: EventLoop) -> None:
    sampler = Sampler(loop, mode="one_step_off")
    with sampler.background:
        for version in range(4):
            assert sampler.take(version) == [2 * version, 2 * version + 1]
            sampler.move_to(version + 1)


def test_no_more_is_begun_than_the_bound_allows(loop: EventLoop) -> None:
    sampler = Sampler(loop, mode="async", max_staleness=2)
    with sampler.background:
        sampler.take(0)
        sampler.background.pause_for_sync()
        samples, _, metrics = sampler.background.take(WeightVersion(0))
        assert len(samples) == 4
        assert metrics["buffer/finished"] + metrics["buffer/unfinished"] == 2.0
        assert sampler.prompts.state_dict()["position"] == 3 * 2


def test_a_checkpoint_has_the_prompts_that_were_begun_and_not_taken(loop: EventLoop) -> None:
    sampler = Sampler(loop, mode="one_step_off")
    with sampler.background:
        sampler.take(0)
        sampler.background.pause_for_sync()
        assert sampler.prompts.state_dict()["open"] == [2, 3]


def test_groups_without_signal_are_replaced(loop: EventLoop) -> None:
    sampler = Sampler(loop, mode="one_step_off", dynamic_sampling=True, max_rounds=4)
    with sampler.background:
        samples, _, metrics = sampler.background.take(WeightVersion(0))
        assert [s.prompt.index for s in samples[::2]] == [0, 2]
        assert 0 < metrics["sampling/kept_share"] < 1


def test_the_log_of_episodes_tells_what_was_dropped_and_what_was_under_way(
    loop: EventLoop, tmp_path: Path
) -> None:
    path = tmp_path / "episodes.jsonl"
    log = EpisodeLog(path)
    sampler = Sampler(loop, mode="async", max_staleness=1, stale="drop", episodes=log)
    with sampler.background:
        sampler.take(0)
        sampler.wait_until_full()
        sampler.move_to(1)
        sampler.move_to(2)  # what was drawn from version 0 is too old now
        sampler.take(2)
        sampler.move_to(3)
        sampler.wait_until_full()
        sampler.engine.num_free = 0
        sampler.take(3)
        sampler.move_to(4)
        sampler.wait_until(lambda groups: groups.num_unfinished > 0)
    log.close()
    ends = Counter(map(tuple, reasons_by_group(path).values()))
    assert ends[("dropped_stale",) * 2] >= 2 and ends[("aborted",) * 2] >= 1
    assert ends[("length",) * 2] >= 6 and len(ends) == 3


def test_groups_that_no_step_takes_have_their_own_reasons(loop: EventLoop, tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    log = EpisodeLog(path)
    options = {"dynamic_sampling": True, "max_rounds": 4, "with_greedy": True}
    sampler = Sampler(loop, mode="one_step_off", episodes=log, **options)
    with sampler.background:
        sampler.take(0)
        sampler.background.pause_for_sync()
    log.close()
    reasons = reasons_by_group(path)
    assert Counter(map(len, reasons.values())) == {1: len(reasons) // 2, 2: len(reasons) // 2}
    assert {reason for ends in reasons.values() for reason in ends} == {"length"}


def test_lost_prompts_are_sampled_again_and_an_engine_is_revived_the_second_time(
    loop: EventLoop,
) -> None:
    sampler = Sampler(loop, mode="one_step_off")
    sampler.engine.answer = lambda body: (503, "down")
    with sampler.background:
        assert sorted(sampler.take(0)) == [0, 1]
        assert sampler.num_revived == 1


def test_a_step_fails_if_no_engine_can_be_revived(loop: EventLoop) -> None:
    sampler = Sampler(loop, mode="one_step_off")
    sampler.engine.answer = lambda body: (503, "down")
    sampler.can_revive = False
    with sampler.background, pytest.raises(RolloutError, match="HTTP 503: down"):
        sampler.take(0)


def test_restarted_responses_are_aborted_and_drawn_by_the_new_weights(loop: EventLoop) -> None:
    sampler = Sampler(loop, mode="async", max_staleness=1, partial="restart")
    sampler.engine.num_free = 4
    with sampler.background:
        assert sorted(sampler.take(0)) == [0, 1]
        sampler.background.pause_for_sync()
        sampler.engine.version = 1
        assert sampler.background.resume(WeightVersion(1)) == {"staleness/restarted": 4.0}
        samples, _, _ = sampler.background.take(WeightVersion(1))
    assert sorted({sample.prompt.index for sample in samples}) == [2, 3]
    assert {span.version for sample in samples for span in sample.versions} == {1}


def test_waiting_for_half_done_responses_aborts_none(loop: EventLoop) -> None:
    sampler = Sampler(loop, mode="async", max_staleness=1, partial="wait")
    sampler.engine.num_free = 4
    with sampler.background:
        sampler.take(0)
        threading.Timer(0.1, sampler.engine.resume).start()
        sampler.background.pause_for_sync()
        sampler.engine.version = 1
        assert sampler.background.resume(WeightVersion(1)) == {"staleness/restarted": 0.0}
        samples, _, _ = sampler.background.take(WeightVersion(1))
    assert {span.version for sample in samples for span in sample.versions} == {0}


def test_greedy_samples_are_scored_for_advantages_that_need_them(loop: EventLoop) -> None:
    sampler = Sampler(loop, mode="one_step_off", with_greedy=True)
    with sampler.background:
        _, scores, _ = sampler.background.take(WeightVersion(0))
    assert scores.greedy_N == [1.0, 1.0, 0.0, 0.0]
    temperatures = [body["sampling_params"]["temperature"] for body in sampler.engine.sampled]
    assert temperatures.count(0.0) >= 2


def test_samples_lost_before_their_scores_are_drawn_again_and_counted(loop: EventLoop) -> None:
    sampler = Sampler(loop, mode="one_step_off")
    losses = [SamplesLost("collector 0 died", [0])] * 2

    async def score(samples: Sequence[Sample]) -> Scores:
        if losses:
            raise losses.pop()
        return await score_by_index(samples)

    sampler.background._reward = score
    with sampler.background:
        samples, _, metrics = sampler.background.take(WeightVersion(0))
        assert metrics["rollout/lost"] == 4.0 and sampler.num_revived == 0
        sampler.move_to(1)
        assert sorted([s.prompt.index for s in samples[::2]] + sampler.take(1)) == [0, 1, 2, 3]


def test_finished_samples_that_are_lost_are_drawn_again(loop: EventLoop) -> None:
    sampler = Sampler(loop, mode="one_step_off")
    with sampler.background:
        sampler.take(0)
        sampler.background.pause_for_sync()  # the next step's groups are finished now
        lost = [id(group.samples[0]) for group in sampler.background._buffer.finished()]
        assert len(lost) == 2
        sampler.background._client.is_lost = lambda s: id(s) in lost  # type: ignore[method-assign]
        sampler.background.resume(WeightVersion(1))
        samples, _, metrics = sampler.background.take(WeightVersion(1))
        assert metrics["rollout/lost"] == 4.0
        sampler.move_to(2)
        assert sorted([s.prompt.index for s in samples[::2]] + sampler.take(2)) == [2, 3, 4, 5]
