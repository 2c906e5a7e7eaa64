"""Who waits outlasts what it waits for, in every recipe."""

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.cluster.model_group import ModelGroup
from mcore_rl.config import Config, RewardConfig, RolloutConfig, RunConfig
from mcore_rl.config.deadlines import (
    ANSWER_MARGIN_S,
    BATCH_S,
    STOPPED_S,
    Deadlines,
    answer_s,
    limit_batch,
)
from mcore_rl.config.rollout import ServedModelConfig
from mcore_rl.weight_sync.controller.strategy import GRACE_S
from mcore_rl.workers.engine_worker import limit_silence

SECONDS = st.floats(0.1, 1e6)


@given(SECONDS, SECONDS, st.integers(0, 9), SECONDS, SECONDS)
def test_no_deadline_is_shorter_than_what_it_waits_for(
    call_s: float, request_s: float, retries: int, reward_s: float, judge_s: float
) -> None:
    config = Config(
        run=RunConfig(call_timeout_s=call_s),
        rollout=RolloutConfig(request_timeout_s=request_s, retries=retries),
        reward=replace(RewardConfig(), timeout_s=reward_s),
        judge=ServedModelConfig(path="/judge", request_timeout_s=judge_s),
    )
    deadlines = Deadlines.from_options(
        config.run, config.rollout, config.reward, config.served_groups.values()
    )
    for name, (outer, inner) in deadlines.pairs.items():
        assert outer > inner, (name, outer, inner)
    assert deadlines.score > max(reward_s, judge_s)
    assert deadlines.stopped <= STOPPED_S


@given(SECONDS)
def test_a_stuck_batch_ends_its_engine_before_its_requests_are_given_up(request_s: float) -> None:
    batch_s = limit_batch(request_s)
    assert BATCH_S[0] <= batch_s <= BATCH_S[1]
    assert request_s < 40.0 or limit_silence(batch_s) <= request_s


def test_the_controller_waits_longer_for_a_sync_than_a_sync_for_its_ranks() -> None:
    assert answer_s(60.0) == 60.0 + ANSWER_MARGIN_S
    # The sync gives up GRACE_S after the ranks do, and canceling the call would kill them.
    assert 0 < GRACE_S < ANSWER_MARGIN_S


def test_groups_wait_longer_than_their_ranks() -> None:
    class Group(ModelGroup):
        role = "trainer"

    group = Group([], Path(), 60.0)
    assert (group._call_timeout_s, group._answer_s) == (60.0, answer_s(60.0))
