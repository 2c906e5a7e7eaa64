"""Samples that tell nothing of the policy are neither compared nor trained on."""

from dataclasses import replace
from math import nan

import numpy as np
import pytest

from mcore_rl.batches.stored_batch import make_stored_batch
from mcore_rl.config import AlgorithmConfig
from mcore_rl.loops.outcomes import RewardFailureError, Rollout, add_advantages, with_outcome
from mcore_rl.types.scores import Scores
from tests.support.prepared import advantages_of, group_of, prepared
from tests.support.stored import make_stored


def test_a_sample_whose_reward_failed_is_not_compared_and_not_trained_on() -> None:
    """[1, 1, 1, timeout] was -1.5 for the last one; it is no group that differs."""
    policy, samples = group_of(4)
    timeout = Scores([1.0, 1.0, 1.0, nan], errors=["", "", "", "TimeoutError: late"])
    left, scores, batch = prepared(policy, AlgorithmConfig(), samples, timeout)
    assert left == samples[:3] and scores.rewards_N == [1.0] * 3
    assert advantages_of(batch) == [0.0] * 3
    unlike = Scores([1.0, 0.0, nan, 0.5], errors=["", "", "late", ""])
    left, scores, batch = prepared(policy, AlgorithmConfig(advantage="dr_grpo"), samples, unlike)
    assert left == [samples[0], samples[1], samples[3]]
    assert advantages_of(batch) == pytest.approx([0.5, -0.5, 0.0])
    counted = Scores([1.0, 1.0, 1.0, 0.0], errors=["", "", "", "counts as 0"])
    left, _, batch = prepared(policy, AlgorithmConfig(), samples, counted)
    assert len(left) == 4 and advantages_of(batch) == pytest.approx([0.5, 0.5, 0.5, -1.5], abs=1e-4)


def test_episodes_whose_environment_failed_are_left_out_of_their_group(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ends = ["done", "env_error", "max_turns", "aborted"]
    policy, group = group_of(4)
    samples = [replace(sample, finish_reason=end) for sample, end in zip(group, ends, strict=True)]
    scores = Scores([1.0, 9.0, 0.0, 9.0])
    left, scores, batch = prepared(policy, AlgorithmConfig(advantage="dr_grpo"), samples, scores)
    assert left == [samples[0], samples[2]] and scores.rewards_N == [1.0, 0.0]
    assert advantages_of(batch) == pytest.approx([0.5, -0.5])
    assert "2 of 4 samples have no outcome" in caplog.text


def test_a_step_without_any_outcome_is_an_error_that_names_the_first() -> None:
    failed = Scores([nan] * 2, errors=["TimeoutError: late", "ValueError: x"])
    message = r"none of 2 samples has an outcome, .*; the first: 'TimeoutError: late'\. Mend what"
    with pytest.raises(RewardFailureError, match=message):
        with_outcome(Rollout(group_of(2)[1], failed))


def test_advantages_come_back_to_the_samples_that_were_drawn() -> None:
    """Samples without an outcome or without a token have none."""
    _, _, samples = make_stored(2)
    drawn = Rollout(samples, Scores([float(place) for place in range(len(samples))]))
    kept = drawn.select([place for place in range(len(samples)) if place != 1])
    batch = make_stored_batch(kept.samples)
    assert add_advantages(drawn, kept, batch) is drawn.scores, "advantages by token"
    present = [place for place, s in enumerate(samples) if place != 1 and s.response_len]
    assert 2 <= len(present) < len(samples)
    batch = replace(batch, advantages_N=np.array(present, np.float32))
    scores = add_advantages(drawn, kept, batch)
    expected = [float(place) if place in present else nan for place in range(len(samples))]
    assert scores.advantages_N == pytest.approx(expected, nan_ok=True)
    assert scores.rewards_N == drawn.scores.rewards_N
