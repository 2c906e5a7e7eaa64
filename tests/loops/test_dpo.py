"""Preference optimization of a tiny policy: chosen responses win, on held-out pairs too."""

import pytest
import torch

from mcore_rl.algo.policy_loss import make_policy_loss
from mcore_rl.config import (
    AlgorithmConfig,
    CheckpointConfig,
    DpoConfig,
    PreferenceConfig,
)
from mcore_rl.data.preferences import Pair, PreferenceStream, batches_of
from mcore_rl.loops.dpo import (
    PreferenceOptions,
    optimize_preferences,
    sum_over_responses,
    with_pair_gradient,
)
from tests.support.table_policy import MemoryLog, TablePolicy


def make_pairs(number: int) -> list[Pair]:
    """After token n, n + 1 is chosen over n."""
    return [(((0, n % 4, n % 4 + 1, 0), 2), ((0, n % 4, n % 4), 2)) for n in range(number)]


def run(loss: str, steps: int = 6) -> tuple[TablePolicy, MemoryLog]:
    preference = PreferenceConfig(loss, beta=0.5)
    algorithm = AlgorithmConfig(loss="policy_gradient", preference=preference)
    options = PreferenceOptions(
        DpoConfig(steps=steps, batch_size=4),
        preference,
        CheckpointConfig(every_steps=4),
        eval_every_steps=3,
    )
    learning_rate = 0.05 if loss == "ipo" else 2.0  # ipo's squares overshoot
    policy, log = TablePolicy(make_policy_loss(algorithm), learning_rate), MemoryLog()
    stream = PreferenceStream(make_pairs(12), seed=0)
    optimize_preferences(options, stream, batches_of(make_pairs(5), 2), policy, log)
    return policy, log


@pytest.mark.parametrize("loss", ["dpo", "ipo", "hinge", "simpo"])
def test_chosen_responses_win(loss: str) -> None:
    policy, log = run(loss)
    losses = log.values("loss/total")
    assert list(losses) == [1, 2, 3, 4, 5, 6] and losses[6] < losses[1]
    assert log.values("preference/margin")[6] > log.values("preference/margin")[1]
    held_out = log.values("eval/preference/accuracy")
    assert list(held_out) == [3, 6] and held_out[6] == 1
    assert ("reference" in policy.calls) == (loss != "simpo")
    assert {step: state["pairs"]["position"] for step, state in policy.saved.items()} == {
        4: 16,
        6: 24,
    }


def test_the_trained_loss_has_the_gradient_of_the_pairs_loss() -> None:
    """Against autograd through -log sigmoid(margin) on the policy's own table."""
    preference = PreferenceConfig("dpo", beta=0.5)
    algorithm = AlgorithmConfig(loss="policy_gradient", preference=preference)
    policy = TablePolicy(make_policy_loss(algorithm), learning_rate=1.0)
    policy.weights = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    (batch,) = batches_of(make_pairs(3), 3)
    weighted, _ = with_pair_gradient(batch, policy, preference)
    leaf = policy.weights.clone().requires_grad_()
    tables = torch.stack([leaf, policy.reference])
    before_T = batch.token_ids_T.roll(1)
    logprobs_2T = tables[:, before_T].log_softmax(-1)[:, range(len(before_T)), batch.token_ids_T]
    ratios_N = sum_over_responses(batch, logprobs_2T[0] - logprobs_2T[1])
    loss = -torch.nn.functional.logsigmoid(0.5 * (ratios_N[::2] - ratios_N[1::2])).mean()
    (gradient,) = torch.autograd.grad(loss, leaf)
    policy.train_step(weighted)
    torch.testing.assert_close(policy.weights, leaf.detach() - gradient, rtol=1e-5, atol=1e-6)
