"""Background sampling on a fake engine: order, staleness, lost engines, replaced groups."""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config import RewardConfig
from mcore_rl.logs.episode_log import EpisodeLog
from mcore_rl.loops.outcomes import RewardFailureError
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.process.lost_samples import SamplesLostError
from mcore_rl.rollout import client as client_module
from mcore_rl.rollout.transport import RolloutError
from mcore_rl.run.roles.background import BackgroundSampler
from mcore_rl.types import StoredSample, WeightVersion
from mcore_rl.types.scores import Scores
from tests.support.background_sampling import Sampler, score_by_index
from tests.support.episode_rows import reasons_by_group
from tests.support.fake_sglang import loop_with_quick_retries


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[EventLoop]:
    with loop_with_quick_retries(monkeypatch, client_module) as loop:
        yield loop


def test_one_step_off_takes_every_prompt_in_order(loop: EventLoop) -> None:
    sampler = Sampler(BackgroundSampler, loop, mode="one_step_off")
    with sampler.background:
        for version in range(4):
            assert sampler.take(version) == [2 * version, 2 * version + 1]
            sampler.move_to(version + 1)


def test_no_more_is_begun_than_the_bound_allows(loop: EventLoop) -> None:
    sampler = Sampler(BackgroundSampler, loop, mode="async", max_staleness=2)
    with sampler.background:
        sampler.take(0)
        sampler.wait_until_full()
        sampler.background.pause_for_sync()
        assert sampler.prompts.state_dict()["position"] == 3 * 2


def test_a_checkpoint_has_the_prompts_that_were_begun_and_not_taken(loop: EventLoop) -> None:
    sampler = Sampler(BackgroundSampler, loop, mode="one_step_off")
    with sampler.background:
        sampler.take(0)
        sampler.background.pause_for_sync()
        assert sampler.prompts.state_dict()["open"] == [2, 3]


def test_rewards_that_failed_give_no_signal_and_end_the_run_if_there_are_many(
    loop: EventLoop,
) -> None:
    """Prompt 0 is [1, crashed], 1 has equal rewards; 2 and 3 differ."""
    tables = [[1.0, nan], [1.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]

    async def score(samples: Sequence[StoredSample]) -> Scores:
        rewards = [tables[s.prompt.index][s.sample_index] for s in samples]
        return Scores(rewards, errors=["crashed" * isnan(reward) for reward in rewards])

    mode = {"mode": "one_step_off", "dynamic_sampling": True, "max_in_flight": 2}
    sampler = Sampler(BackgroundSampler, loop, score=score, **mode)
    with sampler.background:
        samples, scores, metrics = sampler.background.take(WeightVersion(0))
    assert [s.prompt.index for s in samples[::2]] == [2, 3] and scores.outcomes() == [1, 0, 0, 1]
    assert metrics["reward/errors"] == 1

    async def fail(samples: Sequence[StoredSample]) -> Scores:
        return Scores([nan] * len(samples), errors=["crashed"] * len(samples))

    sampler = Sampler(
        BackgroundSampler, loop, score=fail, rewards=RewardConfig(max_failed_share=0.05), **mode
    )
    message = r"^step 1: (\d+) of \1 rewards failed, .*=0.05; the first: 'crashed'"
    with sampler.background, pytest.raises(RewardFailureError, match=message):
        sampler.background.take(WeightVersion(0))


def test_groups_without_signal_are_replaced(loop: EventLoop) -> None:
    sampler = Sampler(
        BackgroundSampler, loop, mode="one_step_off", dynamic_sampling=True, max_rounds=4
    )
    with sampler.background:
        samples, _, metrics = sampler.background.take(WeightVersion(0))
        assert [s.prompt.index for s in samples[::2]] == [0, 2]
        assert 0 < metrics["sampling/kept_share"] < 1


def test_the_log_of_episodes_tells_what_was_dropped_and_what_was_under_way(
    loop: EventLoop, tmp_path: Path
) -> None:
    path = tmp_path / "episodes.jsonl"
    log = EpisodeLog(path)
    sampler = Sampler(
        BackgroundSampler, loop, mode="async", max_staleness=1, stale="drop", episodes=log
    )
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
    sampler = Sampler(BackgroundSampler, loop, mode="one_step_off", episodes=log, **options)
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
    sampler = Sampler(BackgroundSampler, loop, mode="one_step_off")
    sampler.engine.answer = lambda body: (503, "down")
    with sampler.background:
        assert sorted(sampler.take(0)) == [0, 1]
        assert sampler.num_revived == 1


def test_a_step_whose_samples_are_no_use_takes_others_and_the_next_begin_as_early(
    loop: EventLoop,
) -> None:
    sampler = Sampler(BackgroundSampler, loop, mode="async", max_staleness=1)
    with sampler.background:
        taken = [sorted(sampler.take(0)) for _ in range(4)]
        assert len(set(map(tuple, taken))) == 4
        sampler.move_to(1)
        assert len(sampler.take(1)) == 2


def test_a_step_fails_if_no_engine_can_be_revived(loop: EventLoop) -> None:
    sampler = Sampler(BackgroundSampler, loop, mode="one_step_off")
    sampler.engine.answer = lambda body: (503, "down")
    sampler.can_revive = False
    with sampler.background, pytest.raises(RolloutError, match="HTTP 503: down"):
        sampler.take(0)


def test_restarted_responses_are_aborted_and_drawn_by_the_new_weights(loop: EventLoop) -> None:
    sampler = Sampler(BackgroundSampler, loop, mode="async", max_staleness=1, partial="restart")
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
    sampler = Sampler(BackgroundSampler, loop, mode="async", max_staleness=1, partial="wait")
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
    sampler = Sampler(BackgroundSampler, loop, mode="one_step_off", with_greedy=True)
    with sampler.background:
        _, scores, _ = sampler.background.take(WeightVersion(0))
    assert scores.greedy_N == [1.0, 1.0, 0.0, 0.0]
    temperatures = [body["sampling_params"]["temperature"] for body in sampler.engine.sampled]
    assert temperatures.count(0.0) >= 2


def test_samples_lost_before_their_scores_are_drawn_again_and_counted(loop: EventLoop) -> None:
    sampler = Sampler(BackgroundSampler, loop, mode="one_step_off")
    losses = [SamplesLostError("collector 0 died", [0])] * 2

    async def score(samples: Sequence[StoredSample]) -> Scores:
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
    sampler = Sampler(BackgroundSampler, loop, mode="one_step_off")
    with sampler.background:
        sampler.take(0)
        sampler.background.pause_for_sync()  # the next step's groups are finished now
        lost = [id(group.samples[0]) for group in sampler.background._buffer.list_finished()]
        assert len(lost) == 2
        client: Any = sampler.background._client
        client.is_lost = lambda s: id(s) in lost
        client.num_losses = 1
        sampler.engine.version = 1
        sampler.background.resume(WeightVersion(1))
        samples, _, metrics = sampler.background.take(WeightVersion(1))
        assert metrics["rollout/lost"] == 4.0
        sampler.move_to(2)
        assert sorted([s.prompt.index for s in samples[::2]] + sampler.take(2)) == [2, 3, 4, 5]


def test_a_step_joins_its_scores_once_and_looks_for_losses_only_after_one(
    loop: EventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = Sampler(BackgroundSampler, loop, mode="one_step_off", prompts_per_step=16)
    asked: list[int] = []
    client: Any = sampler.background._client
    client.is_lost = lambda sample: bool(asked.append(sample.prompt.index))
    with sampler.background:
        sampler.take(0)
        sampler.background.pause_for_sync()  # the next step's groups are finished now
        made: list[int] = []
        check = Scores.__post_init__

        def noted(scores: Scores) -> None:
            made.append(len(scores.rewards_N))
            check(scores)

        asked.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Scores, "__post_init__", noted)
            for _ in range(20):
                sampler.background._notify()
            sampler.engine.version = 1
            sampler.background.resume(WeightVersion(1))
            _, scores, _ = sampler.background.take(WeightVersion(1))
        assert len(scores.rewards_N) == 32 and made.count(32) == 1
        assert max(num for num in made if num != 32) <= 2, "scores were joined group by group"
        # Groups of the step after it may have finished meanwhile; none is asked for twice.
        assert len(set(asked)) == len(asked)
