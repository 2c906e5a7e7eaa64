"""Algorithms at their edges: the side of a bound, signs, shares that are logged, what is refused.

Each value is one that `make mutants` had changed without a test that noticed.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mcore_rl.algo.advantages import distillation, teacher_log_ratio
from mcore_rl.algo.aggregation import constant, sequence_weights
from mcore_rl.algo.covariance import covariance
from mcore_rl.algo.estimator import Advantages
from mcore_rl.algo.lookup import advantages
from mcore_rl.algo.losses import binary_tv, cispo, clip_cov, dppo, gmpo, kl_cov
from mcore_rl.algo.preferences import Likelihoods, implicit_rewards, pairs_by_turns
from mcore_rl.algo.registry import LossTokens
from mcore_rl.algo.values import value_loss
from mcore_rl.checks.algorithm import check_pairs, check_teacher
from mcore_rl.config import (
    AlgorithmConfig,
    KLConfig,
    PreferenceConfig,
    RolloutConfig,
    ServedModelConfig,
    TrainConfig,
)
from mcore_rl.types import TrainBatch
from tests.support.outcomes import outcomes_of

SIGNS = torch.tensor([1.0, 0.0, -1.0, 1.0, 0.0, -1.0], dtype=torch.float64)
UP_AND_DOWN = torch.tensor([0.7, 0.7, 0.7, -0.7, -0.7, -0.7], dtype=torch.float64)


def tokens(
    log_ratio_T: Tensor, advantages_T: Tensor, logprobs_T: Tensor | None = None
) -> LossTokens:
    logprobs_T = torch.full_like(log_ratio_T, -1.0) if logprobs_T is None else logprobs_T
    return LossTokens(logprobs_T, log_ratio_T, advantages_T, lambda x: x, lambda x: x)


def test_a_teacher_that_finds_a_token_likelier_makes_it_likelier() -> None:
    """reward_coef is 0 by default: what is left is log teacher - log policy."""
    outcomes = replace(
        outcomes_of([(1.0, 0, 2), (0.0, 0, 1)]),
        logprobs_R=torch.tensor([-2.0, -1.0, -0.5]),
        teacher_logprobs_R=torch.tensor([-0.5, -1.25, -0.5]),
    )
    assert teacher_log_ratio(outcomes).tolist() == [1.5, -0.25, 0.0]
    config = AlgorithmConfig(advantage="distillation", reward_coef=0.0)
    assert distillation(outcomes, config).tolist() == [1.5, -0.25, 0.0]


def test_cispo_counts_tokens_beyond_each_side() -> None:
    ratio_T = torch.tensor([1.5, 1.31, 1.2, 0.81, 0.79], dtype=torch.float64)
    _, metrics = cispo(tokens(ratio_T.log(), torch.ones(5)), clip_low=0.2, clip_high=0.3)
    assert metrics["clip/high_share"].tolist() == [1, 1, 0, 0, 0]
    assert metrics["clip/low_share"].tolist() == [0, 0, 0, 0, 1]


def test_gmpo_counts_tokens_only_on_the_side_where_it_clips() -> None:
    _, metrics = gmpo(tokens(UP_AND_DOWN, SIGNS), clip_low=0.4, clip_high=0.4)
    assert metrics["clip/high_share"].tolist() == [1, 0, 0, 0, 0, 0]
    assert metrics["clip/low_share"].tolist() == [0, 0, 0, 0, 0, 1]


def test_dppo_drops_tokens_that_have_moved_by_more_than_its_bounds_and_none_at_them() -> None:
    """Probabilities that binary fractions hold: 1/2 -> 3/4 is a distance of exactly 1/4."""
    new_T = torch.tensor([0.75, 0.75, 0.75, 0.25], dtype=torch.float64)
    log_ratio_T = (new_T / 0.5).log()
    given = tokens(log_ratio_T, torch.tensor([1.0, 0.0, -1.0, 1.0]).double(), new_T.log())
    bounds = {"divergence": lambda p, q: (p.exp() - 0.5).abs(), "max_ratio": 5.0}
    at, metrics = dppo(given, clip_low=0.25, clip_high=0.25, **bounds)
    assert not metrics["clip/high_share"].any() and not metrics["clip/low_share"].any()
    assert at.tolist() == pytest.approx(
        (-(new_T / 0.5) * given.advantages_T * new_T.log()).tolist()
    )
    beyond, metrics = dppo(given, clip_low=0.25, clip_high=0.24, **bounds)
    assert metrics["clip/high_share"].tolist() == [1, 0, 0, 0]
    assert beyond[0] == 0 and beyond[1:].tolist() == at[1:].tolist()
    assert binary_tv(new_T.log(), torch.full_like(new_T, 0.5).log()).tolist() == pytest.approx(
        [0.25] * 4
    )


@pytest.mark.parametrize(
    "loss",
    [
        lambda given: kl_cov(given, kl_coef=1.0),
        lambda given: clip_cov(given, clip_low=0.2, clip_high=0.2),
    ],
    ids=["kl_cov", "clip_cov"],
)
def test_losses_that_hold_tokens_back_name_what_is_missing(loss) -> None:
    with pytest.raises(ValueError, match=r"needs batch\.held_back_T, see mcore_rl\.algo\.cov"):
        loss(tokens(UP_AND_DOWN, SIGNS))


def test_turns_have_equal_weights_that_add_up_to_one() -> None:
    pairs = pairs_by_turns(6)
    assert pairs.chosen_P.tolist() == [0, 2, 4] and pairs.rejected_P.tolist() == [1, 3, 5]
    assert pairs.weights_P.tolist() == [1 / 3] * 3


def test_a_response_without_tokens_has_no_reward() -> None:
    likelihoods = Likelihoods(torch.tensor([0.0, -3.0]).double(), torch.tensor([0, 2]))
    config = PreferenceConfig("simpo", beta=2.0)
    assert implicit_rewards(likelihoods, config).tolist() == [0.0, -3.0]


def test_a_rank_without_sequences_has_a_finite_weight() -> None:
    assert constant(torch.empty(0), 8).tolist() == 1 / 8
    assert constant(torch.ones(3), 8).tolist() == 1 / 24


def test_rows_of_a_sample_count_as_one_sequence() -> None:
    """Two samples: one of 2 + 3 trained tokens in two rows, one of a single token."""
    trained_N, sample_N = torch.tensor([2, 1, 3]), torch.tensor([7, 4, 7])
    weights_N = sequence_weights("sequence_mean", trained_N, sample_N=sample_N)
    assert weights_N.tolist() == pytest.approx([1 / 10, 1 / 2, 1 / 10])
    assert sequence_weights("constant", trained_N, 8, sample_N).tolist() == [1 / 16] * 3


def test_the_logged_share_of_clipped_values_is_of_those_where_the_clip_counts() -> None:
    """From 0 the clip leaves 1/2 of a step of 2: nearer to -1 than 2 is, further from 3."""
    batch = TrainBatch(
        torch.arange(3),
        torch.ones(3, dtype=torch.bool),
        (3,),
        values_T=torch.zeros(3),
        returns_T=torch.tensor([3.0, -1.0, 0.25]),
    )
    loss_T, metrics = value_loss(torch.tensor([2.0, 2.0, 0.25]), batch, clip=0.5)
    assert metrics["clipped_share"].tolist() == [1, 0, 0]
    assert loss_T.tolist() == [0.5 * 2.5**2, 0.5 * 3.0**2, 0.0]


def test_covariances_are_those_of_float64() -> None:
    """1 + 2^-20 squared needs 41 bits; float32 has 24."""
    small = 2.0**-20
    values_R = torch.tensor([1.0, 1.0 + small, 1.0 + 3 * small], dtype=torch.float32)
    got = covariance(values_R, values_R)
    mean = (0 + 1 + 3) * small / 3
    expected = [(offset - mean) ** 2 for offset in (0.0, small, 3 * small)]
    assert got.dtype == torch.float64 and got.tolist() == pytest.approx(expected, rel=1e-9, abs=0)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AlgorithmConfig(advantage="grpo"), True),
        (AlgorithmConfig(advantage="dr_grpo"), True),
        (AlgorithmConfig(advantage="rloo"), True),
        (AlgorithmConfig(advantage="opo"), True),
        (AlgorithmConfig(advantage="gpg"), True),
        (AlgorithmConfig(advantage="grpo_pass_k"), True),
        (AlgorithmConfig(advantage="grpo", kl=KLConfig(coef=0.1, in_reward=True)), False),
        (AlgorithmConfig(advantage="grpo", kl=KLConfig(coef=0.1, in_reward=False)), True),
        (AlgorithmConfig(advantage="grpo", kl=KLConfig(coef=0.0, in_reward=True)), True),
        (AlgorithmConfig(advantage="gae"), False),
        (AlgorithmConfig(advantage="distillation"), False),
        (AlgorithmConfig(advantage="reinforce_plus_plus"), False),
        (AlgorithmConfig(advantage="dpo"), False),
    ],
    ids=lambda value: getattr(value, "advantage", str(value)),
)
def test_which_advantages_need_rewards_alone(config: AlgorithmConfig, expected: bool) -> None:
    assert Advantages(config).need_tokens is not expected


def test_pairs_may_take_one_step_and_no_more() -> None:
    algorithm = AlgorithmConfig(advantage="dpo", loss="policy_gradient", aggregation="token_sum")
    needs = advantages.needs("dpo")
    check_pairs(algorithm, TrainConfig(mini_batches=1, epochs=1), needs)
    with pytest.raises(ValueError, match=r"train\.epochs = 2: .* set both to 1"):
        check_pairs(algorithm, TrainConfig(mini_batches=1, epochs=2), needs)


def test_a_temperature_matters_only_with_a_teacher() -> None:
    nobody, teacher = ServedModelConfig(), ServedModelConfig(path="/a")
    warm = RolloutConfig(temperature=0.7)
    grpo, distilled = (AlgorithmConfig(advantage=name) for name in ("grpo", "distillation"))
    check_teacher(grpo, nobody, warm, advantages.needs("grpo"))
    check_teacher(distilled, teacher, RolloutConfig(), advantages.needs("distillation"))
    with pytest.raises(ValueError, match=r"rollout\.temperature=0\.7: .* set rollout\.temp"):
        check_teacher(distilled, teacher, warm, advantages.needs("distillation"))
