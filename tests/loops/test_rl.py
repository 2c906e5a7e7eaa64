"""The training loop with a tiny policy in one process: it learns, evaluates and saves."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any, TypeVar

import pytest
import torch

from mcore_rl.algo.diagnostics import DriftError
from mcore_rl.algo.estimator import Advantages
from mcore_rl.algo.policy_loss import make_policy_loss
from mcore_rl.config import (
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    DriftConfig,
    EvalConfig,
    KLConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from mcore_rl.data.source import ShuffledStream
from mcore_rl.logs.ledger.ledger import RunLedger
from mcore_rl.logs.logger import PhaseTimer
from mcore_rl.loops.outcomes import RewardFailureError
from mcore_rl.loops.rl import run_evaluation, save_checkpoint, train
from mcore_rl.loops.roles import NoRecovery, Roles
from mcore_rl.process.lost_samples import SamplesLostError
from mcore_rl.process.signals import (
    SIGNAL,
    StoppedEarlyError,
    handle_stops,
    watch_for_stop_requests,
)
from mcore_rl.run.roles.advantages import StoredAdvantages
from mcore_rl.run.roles.local_trainer import LocalTrainer
from mcore_rl.types import (
    Prompt,
    Sample,
    StepStats,
    StoredBatch,
    StoredSample,
    WeightVersion,
)
from mcore_rl.types.scores import Scores
from tests.support.prepared import GivenSamples, take_step
from tests.support.table_policy import MemoryLog, TablePolicy, make_prompts, repeats_the_prompt

T = TypeVar("T")
Taken = tuple[list[StoredSample], Scores, dict[str, float]]
SAMPLING = RolloutConfig(
    prompts_per_step=8, samples_per_prompt=4, max_response_len=3, kv_cache_len=64
)
PART = EvalConfig(every_steps=3, correct_part="all", pass_k=2)


@pytest.fixture
def heeds_signals() -> Iterator[None]:
    before = signal.getsignal(SIGNAL)
    watch_for_stop_requests()
    yield
    watch_for_stop_requests()
    signal.signal(SIGNAL, before)


def make_roles(
    policy: TablePolicy, algorithm: AlgorithmConfig, log: MemoryLog, held_out: list[Prompt]
) -> Roles:
    """Return roles in which the policy is generator, trainer and weight sync."""
    return Roles(
        prompts=ShuffledStream(make_prompts(20), seed=0),
        held_out=held_out,
        generator=policy,
        reward=policy.reward_by(repeats_the_prompt),
        advantages=StoredAdvantages(Advantages(algorithm), policy.stores.apply, has_teacher=False),
        trainer=LocalTrainer(policy, policy.stores),
        weights=policy,
        log=log,
        on_tokens=policy.stores.apply,
    )


def run(
    algorithm: AlgorithmConfig, steps: int = 6, start_step: int = 0, **options: Any
) -> tuple[TablePolicy, MemoryLog]:
    config = Config(
        run=RunConfig(steps=steps),
        rollout=SAMPLING,
        algorithm=algorithm,
        reward=RewardConfig(path="unused.py"),
        drift=DriftConfig(stop_above=1e-4),
        **{"eval": PART, "checkpoint": CheckpointConfig(every_steps=2), **options},
    )
    policy = TablePolicy(make_policy_loss(algorithm), learning_rate=12.0)
    log = MemoryLog()
    train(config, make_roles(policy, algorithm, log, make_prompts(5)), start_step)
    return policy, log


def test_a_policy_learns_from_its_rewards() -> None:
    policy, log = run(AlgorithmConfig(), steps=24, train=TrainConfig(mini_batches=2))
    rewards = log.values("reward/mean")
    assert list(rewards) == list(range(1, 25))
    assert rewards[1] < 0.5 < 0.9 < rewards[24]
    accuracy = log.values("eval/greedy_accuracy")
    assert list(accuracy) == list(range(0, 25, 3)) and accuracy[0] == 0.2 and accuracy[24] == 1
    assert log.values("eval/pass_at_2")[24] >= log.values("eval/pass_at_1")[24] > 0.5
    assert max(log.values("logprob_diff/mean").values()) < 1e-6
    assert policy.stores.num_groups == 0, "the stores forget the samples of each step"
    assert [step for step, split, _ in log.samples if split == "eval"] == list(accuracy)


def test_stages_follow_one_another() -> None:
    policy, _ = run(AlgorithmConfig(kl=KLConfig(0.01)), steps=1, train=TrainConfig(epochs=2))
    assert policy.calls == [
        *("greedy", "sample"),  # the evaluation before the first step
        *("sample", "logprobs", "reference", "train", "train", "sync"),
        *("greedy", "sample", "save"),
    ]


class LosesOnce(LocalTrainer):
    """Loses all samples at the second optimizer step that it is asked for."""

    num_calls = 0

    def train_step(self, batch: StoredBatch) -> StepStats:
        self.num_calls += 1
        if self.num_calls == 2:
            raise SamplesLostError("the collector died", batch.store_N.tolist())
        return super().train_step(batch)


class LosingPolicy(TablePolicy):
    num_lost = 0

    def note_lost(self, num_samples: int) -> None:
        self.num_lost += num_samples


@dataclass
class TakesBack(NoRecovery):
    policy: TablePolicy

    def train(self, step: int, work: Callable[[], T]) -> tuple[T, Mapping[str, float]]:
        self.before = self.policy.weights.clone()
        return super().train(step, work)

    def take_back(self) -> bool:
        self.policy.weights = self.before
        return True


def test_samples_that_are_all_lost_are_drawn_again_from_the_same_prompts() -> None:
    """An optimizer step that was taken before the loss is taken back."""
    algorithm = AlgorithmConfig(advantage="remax", loss="policy_gradient")
    train = TrainConfig(mini_batches=2)
    wanted = TablePolicy(make_policy_loss(algorithm), learning_rate=12.0)
    roles = make_roles(wanted, algorithm, MemoryLog(), [])
    take_step(roles, algorithm, train=train, rollout=SAMPLING)
    policy = LosingPolicy(make_policy_loss(algorithm), learning_rate=12.0)
    log = MemoryLog()
    roles = make_roles(policy, algorithm, log, [])
    roles = replace(roles, trainer=LosesOnce(policy, policy.stores), recovery=TakesBack(policy))
    take_step(roles, algorithm, train=train, rollout=SAMPLING)
    assert torch.equal(policy.weights, wanted.weights)
    assert policy.num_lost == 32 and log.values("batch/lost") == {1: 0.0}
    assert roles.prompts.state_dict()["position"] == 8, "no prompt is left out"


def test_the_background_gives_other_samples_for_those_that_are_all_lost() -> None:
    policy = LosingPolicy(make_policy_loss(AlgorithmConfig()))
    first, second = make_prompts(4)[:2], make_prompts(4)[2:]
    rejected: list[tuple[int, str]] = []

    class Ledger(RunLedger):
        def reject(self, position: int, why: str) -> None:
            rejected.append((position, why))

    class Background(GivenSamples):
        def take(self, version: WeightVersion) -> Taken:
            prompts = [replace(prompt, position=i) for i, prompt in enumerate(prompts_left.pop(0))]
            samples = policy.generate(prompts, 4, greedy=False, seed=0)
            return samples, policy.reward_by(repeats_the_prompt)(samples), {}

    prompts_left = [first, second]
    log = MemoryLog()
    roles = make_roles(policy, AlgorithmConfig(), log, [])
    lossy = LosesOnce(policy, policy.stores)
    lossy.num_calls = 1
    parts: dict[str, Any] = {"background": Background([], Scores([])), "ledger": Ledger()}
    roles = replace(roles, trainer=lossy, recovery=TakesBack(policy), **parts)
    take_step(roles, AlgorithmConfig())
    assert rejected == [(0, "lost"), (1, "lost")] and not prompts_left
    assert log.samples == [(1, "train", 8)]


def test_the_background_is_asked_again_once_lost_ranks_are_back() -> None:
    policy = TablePolicy(make_policy_loss(AlgorithmConfig()))
    samples = policy.generate(make_prompts(4)[:2], 4, greedy=False, seed=0)
    scores = policy.reward_by(repeats_the_prompt)(samples)
    errors = [ConnectionError("a rank is lost")]

    class Background(GivenSamples):
        def take(self, version: WeightVersion) -> Taken:
            if errors:
                raise errors.pop()
            return super().take(version)

    class Recovers(NoRecovery):
        def repeat(self, work: Callable[[], T]) -> T:
            try:
                return work()
            except ConnectionError:
                return work()

    log = MemoryLog()
    roles = make_roles(policy, AlgorithmConfig(), log, [])
    roles = replace(roles, background=Background(samples, scores), recovery=Recovers())
    take_step(roles, AlgorithmConfig())
    assert log.samples == [(1, "train", 8)]


def test_a_greedy_baseline_is_sampled_where_the_advantage_needs_it() -> None:
    policy, log = run(AlgorithmConfig(advantage="remax", loss="policy_gradient"), steps=12)
    assert policy.calls[2:5] == ["sample", "greedy", "train"]
    assert log.values("reward/mean")[12] > log.values("reward/mean")[1]


def test_checkpoints_hold_what_a_later_run_continues_from() -> None:
    policy, log = run(AlgorithmConfig(), steps=5)
    assert list(policy.saved) == [2, 4, 5]
    assert [state["prompts"]["position"] for state in policy.saved.values()] == [16, 32, 40]
    assert all(state["step"] == step for step, state in policy.saved.items())
    assert policy.saved[5]["advantages"] == {"kl_coef": 0.0}
    assert list(log.values("time/checkpoint")) == [2, 4, 5]
    resumed, log = run(AlgorithmConfig(), steps=5, start_step=5)
    assert not resumed.calls and not log.rows


def test_a_save_keeps_samples_of_the_background_before_the_state() -> None:
    algorithm = AlgorithmConfig()
    policy = TablePolicy(make_policy_loss(algorithm))
    log = MemoryLog()
    background = GivenSamples([], Scores([]))
    roles = replace(make_roles(policy, algorithm, log, held_out=[]), background=background)
    save_checkpoint(roles, PhaseTimer(7), 7)
    assert background.kept == [7] and list(policy.saved) == [7]


@dataclass
class SlowPolicy(TablePolicy):
    """A policy whose rollout number `slow_at` is asked to stop, and takes longer than the grace."""

    slow_at: int = 0

    def generate(self, *args: Any, **kwargs: Any) -> list[StoredSample]:
        samples = super().generate(*args, **kwargs)
        if self.calls.count("sample") == self.slow_at:
            os.kill(os.getpid(), SIGNAL)
            threading.Event().wait(10.0)
        return samples


@pytest.mark.parametrize("every_steps", [0, 3])
def test_a_rollout_that_outlasts_the_grace_is_given_up_and_the_step_before_is_saved(
    heeds_signals: None, every_steps: int
) -> None:
    algorithm = AlgorithmConfig()
    policy = SlowPolicy(make_policy_loss(algorithm), slow_at=4)
    log = MemoryLog()
    rollout = RolloutConfig(
        prompts_per_step=8, samples_per_prompt=4, max_response_len=3, kv_cache_len=64
    )
    config = Config(
        run=RunConfig(steps=9),
        rollout=rollout,
        algorithm=algorithm,
        checkpoint=CheckpointConfig(every_steps=every_steps),
    )
    roles = make_roles(policy, algorithm, log, held_out=[])
    message = "after step 3 of 9; the same command continues"
    with pytest.raises(StoppedEarlyError, match=message), handle_stops(grace_s=0.2):
        train(config, roles)
    assert policy.calls.count("save") == 1 and list(policy.saved) == [3]
    assert policy.saved[3]["prompts"]["position"] == 24, "not the prompts of the rollout given up"
    assert policy.calls[-1] == ("sample" if every_steps else "save")


def test_cut_off_responses_can_be_left_out_of_the_loss() -> None:
    policy, _ = run(AlgorithmConfig(filter_overlong=True), steps=1)
    assert all(batch.loss_mask_T.any() for batch in policy.batches)


def test_a_drift_beyond_its_bound_ends_the_run() -> None:
    algorithm = AlgorithmConfig()
    policy = TablePolicy(make_policy_loss(algorithm))
    policy.served = policy.served + 1.0
    policy.served[:, 0] += 2.0
    log = MemoryLog()
    roles = make_roles(policy, algorithm, log, held_out=[])
    config = Config(run=RunConfig(steps=2), drift=DriftConfig(stop_above=0.1))
    rollout = replace(config.rollout, prompts_per_step=16, samples_per_prompt=8)  # of 3 tokens each
    config = replace(config, rollout=rollout)
    with pytest.raises(DriftError, match=r"step 1: .*1\.1e\+00 .*drift\.stop_above=0\.1;"):
        train(config, roles)
    assert [step for step, _ in log.rows][-1] == 1


def test_an_evaluation_of_other_weights_than_the_steps_is_an_error() -> None:
    """An engine that missed a sync would else be reported as the new policy."""
    algorithm = AlgorithmConfig()
    policy = TablePolicy(make_policy_loss(algorithm))
    roles = make_roles(policy, algorithm, MemoryLog(), make_prompts(2))
    config = Config(reward=RewardConfig(path="unused.py"))
    policy.version = WeightVersion(3)
    run_evaluation(config, roles, step=3)
    with pytest.raises(AssertionError, match=r"evaluation of version 4 was drawn from .* \[3\]"):
        run_evaluation(config, roles, step=4)


def test_a_reward_that_fails_costs_its_sample_and_is_logged_with_its_reason() -> None:
    class KeepingLog(MemoryLog):
        def log_samples(
            self, step: int, samples: Sequence[StoredSample], scores: Scores, split: str = "train"
        ) -> None:
            super().log_samples(step, samples, scores, split)
            kept.extend([scores] * (split == "train"))

    def reward(samples: Sequence[Sample]) -> Scores:
        scores = repeats_the_prompt(samples)
        fails = [i == 5 for i in range(len(samples))]
        rewards = [nan if fail else r for fail, r in zip(fails, scores.rewards_N, strict=True)]
        return Scores(rewards, errors=["TimeoutError: late" * fail for fail in fails])

    kept: list[Scores] = []
    algorithm = AlgorithmConfig()
    policy = TablePolicy(make_policy_loss(algorithm))
    log = KeepingLog()
    roles = replace(
        make_roles(policy, algorithm, log, held_out=[]), reward=policy.reward_by(reward)
    )
    config = Config(run=RunConfig(steps=2), reward=RewardConfig(path="unused.py"))
    rollout = replace(config.rollout, prompts_per_step=4, samples_per_prompt=4)
    train(replace(config, rollout=rollout), roles)
    assert [len(batch.lens_N) for batch in policy.batches] == [15, 15]
    assert log.values("rollout/samples") == {1: 15, 2: 15}
    assert log.values("reward/errors") == {1: 1, 2: 1}
    assert log.values("reward/failed_share") == {1: 1 / 16, 2: 1 / 16}
    assert [scores.errors[5] for scores in kept] == ["TimeoutError: late"] * 2
    assert [len(scores.errors) for scores in kept] == [16, 16]
    strict = replace(config, rollout=rollout, reward=replace(config.reward, on_error="stop"))
    with pytest.raises(RewardFailureError, match=r"^step 1: reward.on_error=stop, and 1 of 16"):
        train(strict, roles)
