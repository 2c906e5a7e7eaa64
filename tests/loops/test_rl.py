"""The training loop with a tiny policy in one process: it learns, evaluates and saves."""

from dataclasses import replace
from typing import Any

import pytest

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
from mcore_rl.loops.rl import train
from mcore_rl.roles import Roles
from mcore_rl.types import Prompt
from tests.support.table_policy import MemoryLog, TablePolicy, make_prompts, repeats_the_prompt

PART = EvalConfig(every_steps=3, correct_part="all", pass_k=2)


def make_roles(
    policy: TablePolicy, algorithm: AlgorithmConfig, log: MemoryLog, held_out: list[Prompt]
) -> Roles:
    """The policy plays generator, trainer and weight sync."""
    return Roles(
        prompts=ShuffledStream(make_prompts(20), seed=0),
        held_out=held_out,
        generator=policy,
        reward=repeats_the_prompt,
        advantages=Advantages(algorithm),
        trainer=policy,
        weights=policy,
        log=log,
    )


def run(
    algorithm: AlgorithmConfig, steps: int = 6, start_step: int = 0, **options: Any
) -> tuple[TablePolicy, MemoryLog]:
    config = Config(
        run=RunConfig(steps=steps),
        rollout=RolloutConfig(
            prompts_per_step=8, samples_per_prompt=4, max_response_len=3, kv_cache_len=64
        ),
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
    _, log = run(AlgorithmConfig(), steps=24, train=TrainConfig(mini_batches=2))
    rewards = log.values("reward/mean")
    assert list(rewards) == list(range(1, 25))
    assert rewards[1] < 0.5 < 0.9 < rewards[24]
    accuracy = log.values("eval/greedy_accuracy")
    assert list(accuracy) == list(range(0, 25, 3)) and accuracy[0] == 0.2 and accuracy[24] == 1
    assert log.values("eval/pass_at_2")[24] >= log.values("eval/pass_at_1")[24] > 0.5
    assert max(log.values("logprob_diff/mean").values()) < 1e-6
    assert [step for step, split, _ in log.samples if split == "eval"] == list(accuracy)


def test_stages_follow_one_another() -> None:
    policy, _ = run(AlgorithmConfig(kl=KLConfig(0.01)), steps=1, train=TrainConfig(epochs=2))
    assert policy.calls == [
        *("greedy", "sample"),  # the evaluation before the first step
        *("sample", "logprobs", "reference", "train", "train", "sync"),
        *("greedy", "sample", "save"),
    ]


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
    config = replace(config, rollout=replace(config.rollout, prompts_per_step=4))
    with pytest.raises(DriftError, match="step 1: log-probs of trainer and engine differ by"):
        train(config, roles)
    assert [step for step, _ in log.rows][-1] == 1
