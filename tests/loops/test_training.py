"""Which passes a step makes before it trains, how batches are cut, and who trains when."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from mcore_rl.algo.policy_loss import sft_loss
from mcore_rl.batches.stored_batch import count_trained_tokens, make_stored_batch
from mcore_rl.config import (
    AlgorithmConfig,
    CorrectionConfig,
    CovarianceConfig,
    CriticConfig,
    KLConfig,
    TrainConfig,
)
from mcore_rl.logs.ledger.ledger import RunLedger
from mcore_rl.loops.roles import NoRecovery, Roles
from mcore_rl.loops.training import (
    add_logprobs,
    add_logprobs_and_values,
    mini_batches,
    train_policy,
    train_policy_and_critic,
)
from mcore_rl.process.lost_samples import SamplesLostError
from mcore_rl.types import (
    LogprobOptions,
    StepStats,
    StoredBatch,
    StoredColumn,
    StoredSample,
    TokenScores,
    WeightVersion,
)
from mcore_rl.types.scores import Scores
from tests.support.optimizer_steps import CountingCritic, options_of, roles_of, sampled
from tests.support.prepared import (
    GivenSamples,
    advantages_of,
    group_of,
    prepared,
    take_step,
)
from tests.support.stored import make_stored
from tests.support.table_policy import MemoryLog, TablePolicy

T = TypeVar("T")


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
    policy, batch, _samples = sampled(algorithm)
    batch = add_logprobs(options_of(algorithm, train=train), roles_of(policy).trainer, batch)
    assert policy.calls == calls
    assert (batch.old_logprobs_T is not None) == ("logprobs" in calls)
    assert (batch.ref_logprobs_T is not None) == ("reference" in calls)


def test_sums_of_squares_come_with_the_pass_for_the_old_log_probs() -> None:
    algorithm = AlgorithmConfig(advantage="optimal_token_baseline")
    policy, batch, _samples = sampled(algorithm)
    batch = add_logprobs(options_of(algorithm), roles_of(policy).trainer, batch)
    squares_T = policy.stores.assemble(batch).sum_squares_T
    assert squares_T is not None
    torch.testing.assert_close(squares_T, torch.full((sum(batch.lens_N),), 0.2))


def test_every_sequence_is_in_one_mini_batch_of_each_epoch() -> None:
    _, batch, _samples = sampled(AlgorithmConfig())
    parts = list(mini_batches(batch, 3, 2, seed=5))
    assert len(parts) == 6
    for epoch in (parts[:3], parts[3:]):
        places = [zip(part.group_N, part.index_N, strict=True) for part in epoch]
        found = sorted((int(group), int(index)) for part in places for group, index in part)
        assert found == [(group, index) for group in range(4) for index in range(2)]


def test_tokens_are_held_back_in_each_mini_batch_by_the_loss_that_needs_it() -> None:
    algorithm = AlgorithmConfig(loss="kl_cov", covariance=CovarianceConfig(share=0.25))
    policy, batch, _samples = sampled(algorithm)
    options = options_of(algorithm, train=TrainConfig(mini_batches=2))
    roles = roles_of(policy)
    metrics = train_policy(options, roles, add_logprobs(options, roles.trainer, batch), seed=1)
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
    policy, batch, _samples = sampled(algorithm)
    options = options_of(algorithm, train=TrainConfig(mini_batches=2))
    roles = roles_of(policy)
    batch = add_logprobs(options, roles.trainer, batch)
    for sample_N, wanted in (((0, 0, 1, 1, 2, 2, 3, 3), sources), (tuple(range(8)), ["rows"] * 2)):
        policy.batches.clear()
        train_policy(options, roles, replace(batch, sample_N=np.array(sample_N)), seed=1)
        assert [part.sums_from for part in policy.batches] == wanted


@pytest.mark.parametrize(("step", "policy_trains"), [(1, False), (2, False), (3, True)])
def test_the_policy_waits_for_its_critic(step: int, policy_trains: bool) -> None:
    algorithm = AlgorithmConfig(advantage="gae")
    policy, batch, _samples = sampled(algorithm)
    critic = CountingCritic(policy.stores)
    roles = roles_of(policy, critic=critic)
    options = options_of(algorithm, critic=CriticConfig(warmup_steps=2, epochs=2, mini_batches=2))
    batch = add_logprobs_and_values(options, roles, batch)
    here = policy.stores.assemble(batch)
    assert here.values_T is not None and here.values_T.tolist() == here.token_ids_T.tolist()
    metrics = train_policy_and_critic(options, roles, batch, step)
    assert critic.num_steps == 4 and metrics["critic/loss"] == 0.5
    assert policy.calls == ["train"] * policy_trains
    assert ("loss/policy" in metrics) == policy_trains


class LosingTrainer:
    """Reads samples of stores; `lost` is lost from the first call on that reads some of it."""

    def __init__(self, lost: int) -> None:
        self.lost = SamplesLostError(f"collector {lost} died", [lost])
        self.steps: list[StoredBatch] = []

    def compute_logprobs(
        self, batch: StoredBatch, options: LogprobOptions = LogprobOptions()
    ) -> TokenScores[StoredColumn]:
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


class RewardsAsAdvantages:
    """Keeps what it was called with last."""

    samples: Sequence[StoredSample]
    scores: Scores

    def __call__(
        self, scores: Scores, samples: Sequence[StoredSample], batch: StoredBatch
    ) -> tuple[StoredBatch, dict[str, float]]:
        self.samples = samples
        self.scores = scores
        has_tokens_N = np.array([sample.response_len > 0 for sample in samples])
        return replace(batch, advantages_N=np.array(scores.rewards_N)[has_tokens_N]), {}

    def state_dict(self) -> dict[str, float]:
        raise NotImplementedError


def make_losing_step(
    lost: int, num_stores: int = 2
) -> tuple[LosingTrainer, RewardsAsAdvantages, Roles, list[StoredSample]]:
    """Return roles of a step; a sample's score is its number."""
    trainer, advantages = LosingTrainer(lost), RewardsAsAdvantages()
    samples = make_stored(3, 4, 3, num_stores)[2]
    policy = TablePolicy(sft_loss)
    roles = roles_of(
        policy,
        trainer=trainer,
        advantages=advantages,
        generator=policy,
        weights=policy,
        log=MemoryLog(),
        background=GivenSamples(samples, Scores([float(i) for i in range(len(samples))])),
    )
    return trainer, advantages, roles, samples


TWO_STEPS = options_of(AlgorithmConfig(), train=TrainConfig(mini_batches=2))


def test_samples_lost_before_training_are_left_out_with_their_scores() -> None:
    trainer, advantages, roles, samples = make_losing_step(lost=1)
    take_step(roles, AlgorithmConfig(), train=TrainConfig(mini_batches=2))
    kept = [i for i, sample in enumerate(samples) if sample.lease.store == 0]
    assert advantages.samples == [samples[i] for i in kept] and len(kept) == 6
    assert advantages.scores.rewards_N == kept
    has_tokens = [i for i in kept if samples[i].response_len]
    trained = [step.advantages_N for step in trainer.steps if step.advantages_N is not None]
    assert sorted(np.concatenate(trained).tolist()) == has_tokens
    assert {store for step in trainer.steps for store in step.store_N.tolist()} == {0}
    log: Any = roles.log
    assert log.values("batch/lost") == {1: 6.0} and log.values("rollout/samples") == {1: 6.0}
    assert log.samples == [(1, "train", len(samples))], "all that were drawn"


class LosesStateInSync(NoRecovery):
    """A node with a step's state and samples is lost in the sync; the step is done again."""

    def __init__(self, lose: Callable[[], None]) -> None:
        self._lose = lose
        self.work: Callable[[], object] = lose

    def train(self, step: int, work: Callable[[], T]) -> tuple[T, Mapping[str, float]]:
        self.work = work
        return super().train(step, work)

    def repeat(self, work: Callable[[], T]) -> T:
        if self.work is self._lose:  # nothing is trained yet
            return work()
        work()
        self._lose()
        self.work()
        return work()


class BookedSteps(RunLedger):
    """A ledger that keeps which samples steps were trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[list[StoredSample]] = []

    def note_step(
        self,
        step: int,
        samples: Sequence[StoredSample],
        scores: Scores,
        kept: Sequence[StoredSample],
    ) -> None:
        self.trained.append(list(kept))


class Probed:
    """A weight sync that keeps the stores of its probes."""

    def __init__(self) -> None:
        self.stores: list[set[int]] = []

    def sync(self, version: WeightVersion, probe: StoredBatch) -> Mapping[str, float]:
        self.stores.append(set(probe.store_N.tolist()))
        return {}


def test_a_step_that_is_done_again_with_fewer_samples_is_logged_as_such() -> None:
    trainer, advantages, roles, samples = make_losing_step(lost=2)

    def lose() -> None:
        trainer.lost = SamplesLostError("collector 1 died", [1])

    weights, ledger = Probed(), BookedSteps()
    roles = replace(roles, recovery=LosesStateInSync(lose), weights=weights, ledger=ledger)
    metrics = take_step(roles, AlgorithmConfig(), train=TrainConfig(mini_batches=2))
    kept = [sample for sample in samples if sample.lease.store == 0]
    assert len(kept) == 6 and advantages.samples == kept
    log: Any = roles.log
    assert log.values("batch/lost") == {1: 6.0} and log.values("rollout/samples") == {1: 6.0}
    assert metrics["rollout/samples"] == 6 and ledger.trained == [kept]
    assert weights.stores == [{0, 1}, {0}]


def test_nothing_left_of_a_step_is_an_error() -> None:
    _, _, roles, _ = make_losing_step(lost=0, num_stores=1)
    with pytest.raises(SamplesLostError, match="collector 0 died"):
        take_step(roles, AlgorithmConfig(), train=TrainConfig(mini_batches=2))


def test_sequences_lost_while_training_are_left_out_and_weights_are_of_the_others() -> None:
    trainer, _, roles, samples = make_losing_step(lost=1)
    batch = make_stored_batch(samples)
    train_policy(TWO_STEPS, roles, batch, seed=1)
    assert len(trainer.steps) == 2
    for step in trainer.steps:
        assert set(step.store_N.tolist()) == {0} and step.loss_weights_N is not None
        assert (step.loss_weights_N * count_trained_tokens(step)).sum() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        ("dr_grpo", [0.0, -0.75, 0.25, 0.25]),
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
    policy, samples = group_of(4)
    samples[0] = replace(samples[0], finish_reason="length")
    _, _, batch = prepared(policy, algorithm, samples, Scores([1.0, 0.0, 1.0, 1.0]))
    assert advantages_of(batch) == pytest.approx(expected, abs=1e-4)
    trained = [bool(part.any()) for part in batch.loss_mask_T.split(list(batch.lens_N))]
    assert trained == [False, True, True, True]
