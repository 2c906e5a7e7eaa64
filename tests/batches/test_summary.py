"""Step metrics from samples and optimizer steps."""

from math import isnan

from mcore_rl.batches.summary import SKIPPED, summarize_samples, summarize_steps
from mcore_rl.types import GroupLease, Prompt, StepStats, StoredSample, VersionSpan, WeightVersion
from mcore_rl.types.scores import Scores


def make_sample(prompt_index: int, num_tokens: int, finish_reason: str) -> StoredSample:
    prompt = Prompt(prompt_index, (1, 2), (), "unit", "4")
    span = VersionSpan(0, num_tokens, WeightVersion(0))
    return StoredSample(prompt, 0, num_tokens, finish_reason, (span,), False, GroupLease(0, 0))


def test_samples_are_summarized() -> None:
    samples = [
        make_sample(0, 2, "stop"),
        make_sample(0, 4, "stop"),
        make_sample(1, 6, "length"),
        make_sample(1, 8, "stop"),
    ]
    metrics = summarize_samples(
        samples, Scores([1.0, 0.0, 1.0, 1.0], {"form": [1.0] * 4}), seconds=2.0
    )
    assert metrics["reward/mean"] == 0.75
    assert metrics["reward/groups_without_signal"] == 0.5
    assert metrics["reward/part/form"] == 1.0
    assert metrics["rollout/response_len"] == 5.0
    assert metrics["rollout/response_len_max"] == 8.0
    assert metrics["rollout/truncated_share"] == 0.25
    assert metrics["rollout/tokens_per_second"] == 10.0


def test_groups_have_signal_by_rewards_before_penalties_within_a_role() -> None:
    samples = [make_sample(i // 2, 2, "stop") for i in range(4)]
    scores = Scores(
        [1.0, 0.5, 1.0, 0.0], {"is_test": [0.0, 0.0, 0.0, 1.0]}, unpenalized_N=[1.0, 1.0, 1.0, 0.0]
    )
    shares = [
        summarize_samples(samples, scores, 1.0, role)["reward/groups_without_signal"]
        for role in ("", "is_test")
    ]
    assert shares == [0.5, 1.0]


def test_groups_of_one_sample_are_not_compared() -> None:
    samples = [make_sample(i, 2, "stop") for i in range(2)]
    assert "reward/groups_without_signal" not in summarize_samples(samples, Scores([1.0, 0.0]), 1.0)


def test_steps_are_merged_by_the_kind_of_metric() -> None:
    first = StepStats(1.0, 0.5, 1e-3, 10, {"logprob_diff/mean": 0.2, "logprob_diff/token_max": 3.0})
    second = StepStats(
        3.0, 1.5, 5e-4, 30, {"logprob_diff/mean": 0.4, "logprob_diff/token_max": 1.0}
    )
    metrics = summarize_steps([first, second])
    assert metrics["loss/total"] == 2.0
    assert metrics["loss/grad_norm"] == 1.0
    assert metrics["train/learning_rate"] == 5e-4
    assert metrics["train/tokens"] == 40.0
    assert abs(metrics["logprob_diff/mean"] - 0.3) < 1e-12
    assert metrics["logprob_diff/token_max"] == 3.0


def test_steps_that_are_not_finite_count_only_as_skipped() -> None:
    nan = float("nan")
    taken = StepStats(1.0, 0.5, 1e-3, 10, {"kl/ref": 0.2, SKIPPED: 0.0})
    bad = StepStats(nan, 0.5, 1e-3, 30, {"kl/ref": nan, SKIPPED: 1.0})
    metrics = summarize_steps([taken, bad])
    assert (metrics["loss/total"], metrics["loss/grad_norm"], metrics["kl/ref"]) == (1.0, 0.5, 0.2)
    assert metrics[SKIPPED] == 0.5 and metrics["train/tokens"] == 40.0
    alone = summarize_steps([bad])
    assert "kl/ref" not in alone and alone[SKIPPED] == 1.0 and isnan(alone["loss/total"])
