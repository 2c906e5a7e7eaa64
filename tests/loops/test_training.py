"""Which passes a step makes before it trains, how batches are cut, and who trains when."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.batches.stored_batch import make_stored_batch, trained_lens
from mcore_rl.config import (
    AlgorithmConfig,
    CorrectionConfig,
    CovarianceConfig,
    CriticConfig,
    KLConfig,
    TrainConfig,
)
from mcore_rl.logs import PhaseTimer
from mcore_rl.loops.roles import Roles, in_turn, on_tokens_here
from mcore_rl.loops.training import (
    add_logprobs,
    add_logprobs_and_values,
    mini_batches,
    prepare_batch,
    train_policy,
    train_policy_and_critic,
)
from mcore_rl.process.lost_samples import SamplesLost
from mcore_rl.types import (
    LogprobOptions,
    StepStats,
    StoredBatch,
    StoredColumn,
    StoredSample,
    TokenScores,
)
from mcore_rl.types.scores import Scores
from tests.support.optimizer_steps import CountingCritic, options_of, sampled
from tests.support.prepared import advantages_of, group_of, prepared
from tests.support.stored import make_stored


@pytest.mark.parametrize(
    ("algorithm", "train", "calls"),
    [
        (AlgorithmConfig(), TrainConfig(), []),
        (AlgorithmConfig(), TrainConfig(mini_batches=2), ["logprobs"]),
        (AlgorithmConfig(), TrainConfig(epochs=2), ["logprobs"]),
        (AlgorithmConfig(correction=CorrectionConfig(bypass=True)), TrainConfig(epochs=2), []),
        (AlgorithmConfig(kl=KLConfig(0.1)), TrainConfig(), ["reference"]),
        (
            AlgorithmConfig(kl=KLConfig(0.1, in_reward=True)),
            TrainConfig(),
            ["logprobs", "reference"],
        ),
        (AlgorithmConfig(loss="kl_cov"), TrainConfig(), ["logprobs"]),
        (AlgorithmConfig(advantage="distillation"), TrainConfig(), ["logprobs"]),
    ],
)
def test_a_pass_is_made_if_something_reads_it(
    algorithm: AlgorithmConfig, train: TrainConfig, calls: list[str]
) -> None:
    policy, batch = sampled(algorithm)
    batch = add_logprobs(options_of(algorithm, train=train), policy, batch)
    assert policy.calls == calls
    assert (batch.old_logprobs_T is not None) == ("logprobs" in calls)
    assert (batch.ref_logprobs_T is not None) == ("reference" in calls)


def test_sums_of_squares_come_with_the_pass_for_the_old_log_probs() -> None:
    algorithm = AlgorithmConfig(advantage="optimal_token_baseline")
    policy, batch = sampled(algorithm)
    batch = add_logprobs(options_of(algorithm), policy, batch)
    assert batch.sum_squares_T is not None
    torch.testing.assert_close(batch.sum_squares_T, torch.full((len(batch.token_ids_T),), 0.2))


def test_every_sequence_is_in_one_mini_batch_of_each_epoch() -> None:
    _, batch = sampled(AlgorithmConfig())
    batch = replace(batch, advantages_T=torch.arange(40.0))
    parts = list(mini_batches(batch, 3, 2, seed=5))
    assert len(parts) == 6
    for epoch in (parts[:3], parts[3:]):
        values = torch.cat([part.advantages_T for part in epoch if part.advantages_T is not None])
        assert sorted(values.tolist()) == list(range(40))


def test_tokens_are_held_back_in_each_mini_batch_by_the_loss_that_needs_it() -> None:
    algorithm = AlgorithmConfig(loss="kl_cov", covariance=CovarianceConfig(share=0.25))
    policy, batch = sampled(algorithm)
    options = options_of(algorithm, train=TrainConfig(mini_batches=2))
    fields: dict[str, Any] = dict.fromkeys(Roles.__dataclass_fields__)
    roles = Roles(**fields | {"trainer": policy, "on_tokens": on_tokens_here})
    metrics = train_policy(options, roles, add_logprobs(options, policy, batch), seed=1)
    assert [
        int(part.held_back_T.sum()) for part in policy.batches if part.held_back_T is not None
    ] == [
        3,
        3,
    ]
    assert metrics["clip/held_back_share"] == pytest.approx(0.25)
    assert metrics["train/optimizer_steps"] == 2


@pytest.mark.parametrize(
    ("algorithm", "sources"),
    [
        (AlgorithmConfig(), ["rows", "rows"]),
        (AlgorithmConfig(loss="gspo"), ["old", "current"]),
        (AlgorithmConfig(correction=CorrectionConfig(weight="sequence")), ["old", "old"]),
    ],
)
def test_sums_over_samples_of_several_rows_take_a_pass_once_the_weights_have_moved(
    algorithm: AlgorithmConfig, sources: list[str]
) -> None:
    policy, batch = sampled(algorithm)
    options = options_of(algorithm, train=TrainConfig(mini_batches=2))
    fields: dict[str, Any] = dict.fromkeys(Roles.__dataclass_fields__)
    roles = Roles(**{**fields, "trainer": policy})
    batch = add_logprobs(options, policy, batch)
    for sample_N, wanted in (((0, 0, 1, 1, 2, 2, 3, 3), sources), (tuple(range(8)), ["rows"] * 2)):
        policy.batches.clear()
        train_policy(options, roles, replace(batch, sample_N=sample_N), seed=1)
        assert [part.sums_from for part in policy.batches] == wanted


@pytest.mark.parametrize(("step", "policy_trains"), [(1, False), (2, False), (3, True)])
def test_the_policy_waits_for_its_critic(step: int, policy_trains: bool) -> None:
    algorithm = AlgorithmConfig(advantage="gae")
    policy, batch = sampled(algorithm)
    critic = CountingCritic()
    fields: dict[str, Any] = dict.fromkeys(Roles.__dataclass_fields__)
    both = Roles.__dataclass_fields__["both"].default
    roles = Roles(**fields | {"trainer": policy, "critic": critic, "both": both})
    options = options_of(algorithm, critic=CriticConfig(warmup_steps=2, epochs=2, mini_batches=2))
    batch = add_logprobs_and_values(options, roles, batch)
    assert batch.values_T is not None and batch.values_T.tolist() == batch.token_ids_T.tolist()
    metrics = train_policy_and_critic(options, roles, batch, step)
    assert critic.num_steps == 4 and metrics["critic/loss"] == 0.5
    assert policy.calls == ["train"] * policy_trains
    assert ("loss/policy" in metrics) == policy_trains


class LosingTrainer:
    """Reads samples of stores; `lost` is lost from the first call on that reads some of it."""

    def __init__(self, lost: int) -> None:
        self.lost = SamplesLost(f"collector {lost} died", [lost])
        self.steps: list[StoredBatch] = []

    def compute_logprobs(
        self, batch: StoredBatch, options: LogprobOptions = LogprobOptions()
    ) -> TokenScores:
        self._read(batch)
        return TokenScores(StoredColumn("old_logprobs"))

    def train_step(self, batch: StoredBatch) -> StepStats:
        self._read(batch)
        self.steps.append(batch)
        return StepStats(0.5, 1.0, 1e-5, sum(batch.lens_N), {})

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _read(self, batch: StoredBatch) -> None:
        if (batch.store_N == min(self.lost.stores)).any():
            raise self.lost


def losing(lost: int, num_stores: int = 2) -> tuple[LosingTrainer, Roles, list[StoredSample]]:
    trainer = LosingTrainer(lost)
    fields: dict[str, Any] = dict.fromkeys(Roles.__dataclass_fields__)

    def advantages(
        scores: Scores, samples: Sequence[StoredSample], batch: StoredBatch
    ) -> tuple[StoredBatch, dict[str, float]]:
        has_tokens_N = np.array([sample.response_len > 0 for sample in samples])
        return replace(batch, advantages_N=np.array(scores.rewards_N)[has_tokens_N]), {}

    given = {"trainer": trainer, "advantages": advantages, "on_tokens": on_tokens_here}
    return (
        trainer,
        Roles(**{**fields, **given, "both": in_turn}),
        make_stored(3, 4, 3, num_stores)[2],
    )


TWO_STEPS = options_of(AlgorithmConfig(), train=TrainConfig(mini_batches=2))


def test_samples_lost_before_training_are_left_out_with_their_scores() -> None:
    _, roles, samples = losing(lost=1)
    numbers = [float(i) for i in range(len(samples))]
    left, scores, batch, metrics = prepare_batch(
        TWO_STEPS, roles, PhaseTimer(1), samples, Scores(numbers)
    )
    kept = [i for i, sample in enumerate(samples) if sample.lease.store == 0]
    assert list(left) == [samples[i] for i in kept] and len(kept) == 6
    assert scores.rewards_N == [numbers[i] for i in kept]
    has_tokens = [i for i in kept if samples[i].response_len]
    assert batch.advantages_N.tolist() == has_tokens and set(batch.store_N.tolist()) == {0}
    assert metrics == {"batch/lost": 6.0}


def test_nothing_left_of_a_step_is_an_error() -> None:
    _, roles, samples = losing(lost=0, num_stores=1)
    with pytest.raises(SamplesLost, match="collector 0 died"):
        prepare_batch(TWO_STEPS, roles, PhaseTimer(1), samples, Scores([0.0] * len(samples)))


def test_sequences_lost_while_training_are_left_out_and_weights_are_of_the_others() -> None:
    trainer, roles, samples = losing(lost=1)
    batch = make_stored_batch(samples)
    train_policy(TWO_STEPS, roles, batch, seed=1)
    assert len(trainer.steps) == 2
    for step in trainer.steps:
        assert set(step.store_N.tolist()) == {0} and step.loss_weights_N is not None
        assert (step.loss_weights_N * trained_lens(step)).sum() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        ("dr_grpo", [0.25, -0.75, 0.25, 0.25]),
        ("reinforce_plus_plus", [0.5528, -1.6583, 0.5528, 0.5528]),
    ],
)
def test_responses_that_are_cut_off_count_in_their_group_and_carry_no_loss(
    advantage: str, expected: list[float]
) -> None:
    """DAPO, section 3.4: the loss leaves them out, after advantages are computed with them.

    By token, values are divided by sqrt(12 * 0.75 * 0.25 / 11) = 0.4523.
    """
    algorithm = AlgorithmConfig(advantage=advantage, loss="policy_gradient", filter_overlong=True)
    samples = group_of(4)
    samples[0] = replace(samples[0], finish_reason="length")
    _, _, batch = prepared(algorithm, samples, Scores([1.0, 0.0, 1.0, 1.0]))
    assert advantages_of(batch) == pytest.approx(expected, abs=1e-4)
    trained = [bool(part.any()) for part in batch.loss_mask_T.split(list(batch.lens_N))]
    assert trained == [False, True, True, True]
