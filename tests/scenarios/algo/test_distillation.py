"""Distillation: advantages that pull the policy to a teacher."""

from dataclasses import replace

import pytest
import torch

from mcore_rl.algo.advantages import teacher_log_ratio
from mcore_rl.algo.lookup import advantages
from mcore_rl.config import AlgorithmConfig
from tests.support.outcomes import outcomes_of


def test_distillation_pulls_each_token_to_the_teacher_and_adds_the_task() -> None:
    rows = [(1.0, 0, 2), (0.0, 0, 1)]
    student, teacher = [-1.0, -2.0, -0.5], [-0.4, -3.0, -0.5]
    scored = replace(
        outcomes_of(rows),
        logprobs_R=torch.tensor(student),
        teacher_logprobs_R=torch.tensor(teacher),
    )
    config = AlgorithmConfig(advantage="distillation")
    assert advantages["distillation"](scored, config).tolist() == pytest.approx([0.6, -1.0, 0.0])
    mixed = advantages["distillation"](scored, replace(config, reward_coef=0.5))
    task = 0.5 * 0.5**0.5  # of two samples whose rewards differ by 1: 0.5 / std
    assert mixed.tolist() == pytest.approx([0.6 + task, -1.0 + task, -task], abs=1e-5)
    with pytest.raises(
        ValueError, match=r"algorithm.advantage=distillation needs log-probs of the policy and"
    ):
        advantages["distillation"](outcomes_of(rows), config)


def test_the_expected_step_of_distillation_lowers_the_reverse_kl() -> None:
    """The sum over a vocabulary of p A grad log p is minus the gradient of KL(p || teacher)."""
    generator = torch.Generator().manual_seed(0)
    logits, other = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    log_q, leaf = other.log_softmax(-1), logits.requires_grad_()
    log_p = leaf.log_softmax(-1)
    (gradient,) = torch.autograd.grad(
        (log_p.exp() * (log_p - log_q)).sum(), leaf, retain_graph=True
    )
    scored = replace(
        outcomes_of([(0.0, i, 1) for i in range(5)]),
        logprobs_R=log_p.detach(),
        teacher_logprobs_R=log_q,
    )
    got = advantages["distillation"](scored, AlgorithmConfig(advantage="distillation")).double()
    (step,) = torch.autograd.grad((log_p.exp().detach() * got * log_p).sum(), leaf)
    torch.testing.assert_close(step, -gradient, rtol=0, atol=1e-6)


def test_the_log_ratio_to_the_teacher_needs_both() -> None:
    outcomes = outcomes_of([(0.0, 0, 2)])
    student = torch.tensor([-1.0, -2.0])
    teacher = torch.tensor([-0.5, -3.0])
    scored = replace(outcomes, logprobs_R=student, teacher_logprobs_R=teacher)
    assert teacher_log_ratio(scored).tolist() == [0.5, -1.0]
    assert teacher_log_ratio(scored).dtype == torch.float64
    for missing in ({"logprobs_R": None}, {"teacher_logprobs_R": None}):
        with pytest.raises(ValueError, match="of the policy and of a teacher"):
            teacher_log_ratio(replace(scored, **missing))
