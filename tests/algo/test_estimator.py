"""Scores become advantages of a batch: groups, KL in the reward, energies, parts, greedy ones."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.agents.turn_tree import at_leaves, at_turns
from mcore_rl.algo.estimator import Advantages
from mcore_rl.algo.policy_loss import make_policy_loss
from mcore_rl.algo.sequences import order_trained_tokens
from mcore_rl.config import AlgorithmConfig, CorrectionConfig, KLConfig
from mcore_rl.types import Prompt, Sample, TrainBatch, VersionSpan, WeightVersion
from mcore_rl.types.scores import Scores
from tests.support.laid_out import estimate, make_train_batch, refer_to
from tests.support.turn_trees import random_tree, sample_of

PROMPT = Prompt(0, (1,), (), "unit", None)


def make_samples(lens: Sequence[int], prompts: Sequence[int]) -> list[Sample]:
    return [
        Sample(
            Prompt(index, (1, 2), (), "unit", "4"), 0, (3,) * n, (-0.5,) * n, "stop",
            (VersionSpan(0, n, WeightVersion(0)),) if n else (), "",
        )
        for n, index in zip(lens, prompts, strict=True)
    ]  # fmt: skip


def advantages_of(
    advantages: Advantages, scores: Scores, samples: list[Sample], batch: TrainBatch
) -> Tensor:
    advantages_T = estimate(advantages, scores, samples, batch)[0].advantages_T
    assert advantages_T is not None
    return advantages_T


def test_samples_of_a_prompt_are_its_group_and_empty_ones_count() -> None:
    samples = make_samples([1, 2, 0, 1], [11, 5, 11, 5])
    batch = make_train_batch(samples)
    advised, metrics = estimate(
        Advantages(AlgorithmConfig(advantage="dr_grpo")),
        Scores([1.0, 3.0, 0.0, 2.0]),
        samples,
        batch,
    )
    advantages_T = advised.advantages_T
    assert advantages_T is not None
    assert advantages_T.tolist() == [0, 0, 0.5, 0, 0, 0.5, 0.5, 0, 0, -0.5]
    assert advantages_T.dtype == torch.float32 and metrics == {}


def test_a_kl_penalty_can_be_taken_from_the_reward() -> None:
    samples = make_samples([2, 1], [0, 0])
    old, ref = torch.randn(2, 7, generator=torch.Generator().manual_seed(0))
    batch = replace(make_train_batch(samples), old_logprobs_T=old, ref_logprobs_T=ref)
    config = AlgorithmConfig(advantage="dr_grpo", kl=KLConfig(0.5, "k1", in_reward=True))
    advised, metrics = estimate(Advantages(config), Scores([1.0, 0.0]), samples, batch)
    advantages_T = advised.advantages_T
    assert advantages_T is not None
    assert metrics["kl/coef"] == 0.5
    assert metrics["kl/reward"] == pytest.approx(
        (old - ref)[batch.loss_mask_T].mean().item(), abs=1e-6
    )
    penalties = 0.5 * (old - ref)
    first, second = 1 - penalties[2] - penalties[3], -penalties[6]
    expected = (first - second) / 2
    torch.testing.assert_close(
        advantages_T[batch.loss_mask_T], torch.stack([expected, expected, -expected])
    )
    loss, metrics = make_policy_loss(config)(
        old, old * 0, replace(batch, advantages_T=advantages_T)
    )
    torch.testing.assert_close(loss, metrics["loss/policy"])
    assert metrics["kl/ref"][batch.loss_mask_T].all()
    with pytest.raises(ValueError, match=r"algorithm.kl.in_reward needs log-probs"):
        estimate(
            Advantages(config), Scores([1.0, 0.0]), samples, replace(batch, ref_logprobs_T=None)
        )


def test_the_coefficient_of_a_kl_in_the_reward_is_steered_to_its_target() -> None:
    samples = make_samples([2, 1], [0, 0])
    batch = make_train_batch(samples)
    batch = replace(batch, old_logprobs_T=torch.zeros(7), ref_logprobs_T=torch.full((7,), -0.3))
    kl = KLConfig(0.5, "k1", in_reward=True, target=0.2, horizon=10)
    first = Advantages(AlgorithmConfig(kl=kl))

    def coef_after(advantages: Advantages, batch: TrainBatch) -> float:
        estimate(advantages, Scores([1.0, 0.0]), samples, batch)
        return advantages.state_dict()["kl_coef"]

    assert coef_after(first, batch) == pytest.approx(
        0.5 * (1 + 0.2 * 2 / 10)
    )  # 0.3 / 0.2 - 1, clipped
    near = replace(batch, ref_logprobs_T=torch.full((7,), -0.19))
    assert coef_after(first, near) == pytest.approx(0.52 * (1 - 0.05 * 2 / 10))
    resumed = Advantages(AlgorithmConfig(kl=kl))
    resumed.load_state_dict(first.state_dict())
    assert coef_after(resumed, batch) == coef_after(first, batch)
    assert coef_after(Advantages(AlgorithmConfig(kl=replace(kl, target=0.0))), batch) == 0.5
    with pytest.raises(ValueError, match=r"algorithm.kl.target=0.2 with in_reward=False"):
        KLConfig(0.5, target=0.2)


def test_the_energy_of_a_token_is_the_norm_of_its_gradient_by_the_logits() -> None:
    samples = make_samples([2, 2], [0, 0])
    logits = torch.randn(8, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    log_p = logits.log_softmax(-1)
    batch = make_train_batch(samples)
    batch = replace(batch, old_logprobs_T=log_p[:, 3], sum_squares_T=log_p.exp().square().sum(-1))
    leaf = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(leaf.log_softmax(-1)[:, 3].sum(), leaf)
    energy = gradient.square().sum(-1)
    baseline = Advantages(AlgorithmConfig(advantage="optimal_token_baseline"))
    advantages_T = advantages_of(baseline, Scores([1.0, 0.0]), samples, batch)
    first = energy[2] / (energy[2] + energy[6])
    both = (energy[2] + energy[3]) / (energy[2] + energy[3] + energy[6] + energy[7])
    expected = torch.stack([1 - first, 1 - both, -first, -both]).float()
    torch.testing.assert_close(advantages_T[batch.loss_mask_T], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weight", ["token", "sequence"])
def test_an_importance_weight_scales_the_energy_of_its_token_by_its_square(weight: Any) -> None:
    """The ratios of sample 0 are 2 and 1/4, those of sample 1 are 1; weights end at 3/2."""
    samples = make_samples([2, 2], [0, 0])
    log_ratio_T = torch.tensor([0, 0, 2, 0.25, 0, 0, 1, 1]).log().nan_to_num(neginf=0.0)
    batch = make_train_batch(samples)
    assert batch.rollout_logprobs_T is not None
    old_T = batch.rollout_logprobs_T + log_ratio_T
    squares_T = 2 * old_T.exp()  # so that each energy is 1, but for its weight
    batch = replace(batch, old_logprobs_T=old_T, sum_squares_T=squares_T)
    correction = CorrectionConfig(weight=weight, high=1.5)
    config = AlgorithmConfig(advantage="tir_optimal_token_baseline", correction=correction)
    advantages_T = advantages_of(Advantages(config), Scores([1.0, 0.0]), samples, batch)
    first, both = {"token": (2.25, 2.25 + 0.0625), "sequence": (0.25, 0.5)}[weight]
    baselines = torch.tensor([first / (first + 1), both / (both + 2)])
    expected = torch.cat([1 - baselines, -baselines])
    torch.testing.assert_close(advantages_T[batch.loss_mask_T], expected, rtol=1e-5, atol=1e-5)


def test_parts_of_the_reward_and_the_greedy_reward_reach_their_advantages() -> None:
    samples = make_samples([1, 1], [0, 0])
    batch = make_train_batch(samples)
    scores = Scores([1.2, 0.2], {"right": [1.0, 0.0], "form": [0.2, 0.2]}, greedy_N=[0.5, 0.5])
    gdpo = Advantages(AlgorithmConfig(advantage="gdpo"), {"right": 1.0, "form": 1.0})
    assert advantages_of(gdpo, scores, samples, batch)[batch.loss_mask_T].tolist() == pytest.approx(
        [0.7071, -0.7071], abs=1e-4
    )
    remax = Advantages(AlgorithmConfig(advantage="remax"))
    assert advantages_of(remax, scores, samples, batch)[
        batch.loss_mask_T
    ].tolist() == pytest.approx([0.7, -0.3])
    with pytest.raises(ValueError, match=r"algorithm.advantage=remax needs the rewards of greedy"):
        estimate(remax, Scores([1.0, 0.0]), samples, batch)
    with pytest.raises(ValueError, match=r"algorithm.advantage=gdpo needs .* set reward.parts"):
        Advantages(AlgorithmConfig(advantage="gdpo"))


def test_rewards_of_turns_come_with_their_last_tokens() -> None:
    """A return at gamma 1 is what is still to come; all of it is the episode's reward."""
    samples = [sample_of(random_tree(random.Random(n), 4), PROMPT, n) for n in range(3)]
    batch = make_train_batch(samples)
    batch = replace(batch, values_T=torch.zeros(len(batch.token_ids_T)))
    episodes = [sample.episode for sample in samples if sample.episode is not None]
    rewards = [episode.reward + 5.0 for episode in episodes]
    config = AlgorithmConfig(advantage="gae", gamma=1.0, gae_lambda=1.0)
    advised, _ = estimate(Advantages(config), Scores(rewards), samples, batch)
    assert advised.returns_T is not None and batch.turn_T is not None
    in_order = order_trained_tokens(batch)
    returns_R, turn_R = (t[in_order].tolist() for t in (advised.returns_T, batch.turn_T))
    assert any(episode.rows[0].turn_T.max() > 1 for episode in episodes), "no row skips a turn"
    lens = [sample.response_len for sample in samples]
    for episode, start, stop in zip(
        episodes, [0, *accumulate(lens)], accumulate(lens), strict=False
    ):
        left = episode.reward + 5.0
        for t in range(start, stop):
            assert returns_R[t] == pytest.approx(left, abs=1e-5)
            if t + 1 == stop or turn_R[t + 1] != turn_R[t]:
                left -= episode.turns[turn_R[t]].reward
        assert left == pytest.approx(5.0)


def test_rewards_of_turns_without_a_weight_count_nothing() -> None:
    samples = [sample_of(random_tree(random.Random(n), 4), PROMPT, n) for n in range(3)]
    batch = make_train_batch(samples)
    batch = replace(batch, values_T=torch.zeros(len(batch.token_ids_T)))
    config = AlgorithmConfig(advantage="gae", gamma=1.0, gae_lambda=1.0)
    scores = Scores([2.0] * 3, {"score": [2.0] * 3, "environment": [9.0] * 3})
    advised, _ = estimate(Advantages(config, {"score": 1.0}), scores, samples, batch)
    assert advised.returns_T is not None
    assert advised.returns_T[batch.loss_mask_T].tolist() == pytest.approx(
        [2.0] * int(batch.loss_mask_T.sum())
    )


def test_an_advantage_of_whole_episodes_does_not_see_turns_or_rows() -> None:
    trees = [random_tree(random.Random(n), 6) for n in range(4)]
    rewards = [1.0, 0.0, 3.0, 2.0]
    for cut in (at_leaves, at_turns):
        samples = [sample_of(tree, PROMPT, i, cut) for i, tree in enumerate(trees)]
        batch = make_train_batch(samples)
        advised = advantages_of(
            Advantages(AlgorithmConfig(advantage="dr_grpo")), Scores(rewards), samples, batch
        )
        lens = torch.tensor([sample.response_len for sample in samples])
        expected = (torch.tensor(rewards) - 1.5).repeat_interleave(lens)
        torch.testing.assert_close(advised[batch.loss_mask_T], expected)


def test_samples_are_compared_within_their_role() -> None:
    """Programs 1 and 0, unit tests 0.5 and -0.5: each pair is centered by itself."""
    samples = make_samples([2, 1, 3, 1], [0, 0, 0, 0])
    scores = Scores([1.0, 0.5, 0.0, -0.5], parts={"is_test": [0.0, 1.0, 0.0, 1.0]})
    config = AlgorithmConfig(advantage="dr_grpo", role_part="is_test")
    assert Advantages(config).compute_from_samples(scores, refer_to(samples)).tolist() == [
        0.5,
        0.5,
        -0.5,
        -0.5,
    ]


def test_the_same_role_of_other_prompts_is_another_group() -> None:
    samples = make_samples([1, 1, 1, 1], [0, 0, 1, 1])
    scores = Scores([1.0, 0.0, 5.0, 3.0], parts={"is_test": [0.0] * 4})
    config = AlgorithmConfig(advantage="dr_grpo", role_part="is_test")
    assert Advantages(config).compute_from_samples(scores, refer_to(samples)).tolist() == [
        0.5,
        -0.5,
        1.0,
        -1.0,
    ]


def test_a_role_that_rewards_do_not_have_is_refused() -> None:
    config = AlgorithmConfig(advantage="dr_grpo", role_part="is_test")
    scores = Scores([1.0], parts={"right": [1.0]})
    with pytest.raises(ValueError, match=r"algorithm\.role_part=is_test.*only right"):
        Advantages(config).compute_from_samples(scores, refer_to(make_samples([1], [0])))
