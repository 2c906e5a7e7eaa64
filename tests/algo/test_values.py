"""Generalized advantages and the critic's loss, with its gradient, against loops over tokens."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mcore_rl.algo.advantages import normalize
from mcore_rl.algo.estimator import Advantages
from mcore_rl.algo.lookup import advantages
from mcore_rl.algo.moments import Moments
from mcore_rl.algo.outcomes import Outcomes
from mcore_rl.algo.values import estimate_gae, explained_variance, value_loss
from mcore_rl.config import AlgorithmConfig
from mcore_rl.types import Prompt, Sample, TrainBatch, VersionSpan, WeightVersion
from mcore_rl.types.scores import Scores
from tests.support.laid_out import estimate, make_train_batch

GAMMA, LAM = 0.9, 0.7
LENS = [3, 1, 0, 4]


def outcomes() -> Outcomes:
    generator = torch.Generator().manual_seed(0)
    values, extra = torch.randn(2, sum(LENS), generator=generator, dtype=torch.float64)
    return Outcomes(
        rewards_N=torch.tensor([1.0, -2.0, 5.0, 0.5], dtype=torch.float64),
        group_N=torch.arange(4),
        lens_N=torch.tensor(LENS),
        token_rewards_R=extra,
        values_R=values,
    )


def by_loops(given: Outcomes, gamma: float, lam: float) -> list[float]:
    """The sum over later tokens of (gamma lam)^l delta, written out: arXiv:1506.02438, eq. 16."""
    assert given.values_R is not None and given.token_rewards_R is not None
    advantages, first = [], 0
    last_values = iter([0.0] * 4 if given.last_values_N is None else given.last_values_N.tolist())
    for reward, length in zip(given.rewards_N.tolist(), LENS, strict=True):
        values = [*given.values_R[first : first + length].tolist(), next(last_values)]
        rewards = given.token_rewards_R[first : first + length].tolist()
        if length:
            rewards[-1] += reward
        deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(length)]
        advantages += [
            sum((gamma * lam) ** (later - t) * deltas[later] for later in range(t, length))
            for t in range(length)
        ]
        first += length
    return advantages


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (GAMMA, LAM), (1.0, 0.0)])
def test_advantages_are_discounted_sums_of_td_errors(gamma: float, lam: float) -> None:
    expected = torch.tensor(by_loops(outcomes(), gamma, lam), dtype=torch.float64)
    torch.testing.assert_close(estimate_gae(outcomes(), gamma, lam), expected, rtol=0, atol=1e-12)
    config = AlgorithmConfig(advantage="gae", gamma=gamma, gae_lambda=lam)
    got = normalize(advantages["gae"](outcomes(), config))
    whitened = (expected - expected.mean()) / (expected.var() + 1e-8).sqrt()
    torch.testing.assert_close(got, whitened.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (GAMMA, LAM), (1.0, 0.0)])
def test_samples_that_were_cut_off_go_on_with_the_value_of_their_last_state(
    gamma: float, lam: float
) -> None:
    """The third sample has no token; what follows it is not the next sample's."""
    cut_off = replace(outcomes(), last_values_N=torch.tensor([0.5, 0.0, 9.0, -2.0]))
    expected = torch.tensor(by_loops(cut_off, gamma, lam), dtype=torch.float64)
    torch.testing.assert_close(estimate_gae(cut_off, gamma, lam), expected, rtol=0, atol=1e-12)


def test_the_returns_of_a_cut_off_sample_hold_its_last_value_discounted() -> None:
    """Reward 1 with the last of three tokens and value 4 behind it: 1 + 0.5 * 4 = 3, 1.5, 0.75."""
    given = Outcomes(
        rewards_N=torch.tensor([1.0]),
        group_N=torch.tensor([0]),
        lens_N=torch.tensor([3]),
        values_R=torch.tensor([0.25, -1.0, 2.0]),
        last_values_N=torch.tensor([4.0]),
    )
    assert given.values_R is not None
    assert (estimate_gae(given, 0.5, 1.0) + given.values_R).tolist() == [0.75, 1.5, 3.0]


def sample_of(response: tuple[int, ...], end: str, index: int = 0) -> Sample:
    spans = (VersionSpan(0, len(response), WeightVersion(0)),) if response else ()
    logprobs = (-0.5,) * len(response)
    prompt = Prompt(index, (1, 2), (), "unit", "4")
    return Sample(prompt, 0, response, logprobs, end, spans, "")


@pytest.mark.parametrize("bootstraps", [False, True])
def test_only_what_a_bound_cut_off_is_continued(bootstraps: bool) -> None:
    """The value of the state after a sequence lies at its first token: 10, 20 and 30 here."""
    samples = [
        sample_of((5, 6), "length"),
        sample_of((), "length", 1),
        sample_of((7,), "stop", 2),
        sample_of((8, 9), "max_turns", 3),
    ]
    values_T = torch.tensor([10.0, 0, 1, 2, 20.0, 0, 3, 30.0, 0, 4, 5])
    batch = replace(make_train_batch(samples), values_T=values_T)
    config = AlgorithmConfig(advantage="gae", bootstrap_truncated=bootstraps)
    got, _ = estimate(Advantages(config), Scores([1.0, 0.0, -1.0, 0.5]), samples, batch)
    assert got.returns_T is not None
    expected = [11.0, 11.0, -1.0, 30.5, 30.5] if bootstraps else [1.0, 1.0, -1.0, 0.5, 0.5]
    assert got.returns_T[batch.loss_mask_T].tolist() == expected


def test_an_episode_of_several_rows_is_continued_from_its_last_row() -> None:
    """Two episodes with rows of 3 and 3, and of 2 and 4 tokens; the bound cut off the second."""
    samples = [
        replace(sample_of((1, 2, 3), "stop"), prompt=sample_of((), "", 0).prompt),
        replace(sample_of((4, 5, 6), "max_turns"), prompt=sample_of((), "", 1).prompt),
    ]
    mask = [0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 1, 0]
    values_T = torch.tensor([10.0, 1, 2, 20, 0, 3, 30, 4, 40, 5, 6, 0])
    batch = TrainBatch(
        torch.arange(12),
        torch.tensor(mask).bool(),
        (3, 3, 2, 4),
        values_T=values_T,
        sample_N=(0, 0, 1, 1),
    )
    config = AlgorithmConfig(advantage="gae", bootstrap_truncated=True, gamma=0.5)
    got, _ = estimate(Advantages(config), Scores([1.0, 2.0]), samples, batch)
    assert got.returns_T is not None
    # The first returns 1 at its end, the second 2 + 0.5 * 40 = 22 at its last trained token.
    assert got.returns_T[batch.loss_mask_T].tolist() == [0.25, 0.5, 1.0, 5.5, 11.0, 22.0]


def test_with_lambda_one_the_returns_are_the_rewards_to_go_whatever_the_critic_says() -> None:
    given = outcomes()
    assert given.values_R is not None
    returns_R = estimate_gae(given, GAMMA, 1.0) + given.values_R
    torch.testing.assert_close(returns_R, given.rewards_to_go(GAMMA), rtol=0, atol=1e-12)


def test_without_values_there_are_no_advantages() -> None:
    with pytest.raises(ValueError, match=r"algorithm.advantage=gae needs a critic's values"):
        estimate_gae(replace(outcomes(), values_R=None), 1.0, 1.0)


def test_policy_and_critic_may_have_a_lambda_each() -> None:
    samples = [
        Sample(
            Prompt(0, (1, 2), (), "unit", "4"), 0, (3,) * 3, (-0.5,) * 3, "stop",
            (VersionSpan(0, 3, WeightVersion(0)),), "",
        )
    ]  # fmt: skip
    mask_T = torch.tensor([False, False, True, True, True])
    batch = TrainBatch(
        torch.arange(5), mask_T, (5,), values_T=torch.tensor([9.0, 9.0, 0.5, 0.25, 1.0])
    )
    config = AlgorithmConfig(advantage="gae", gae_lambda=0.0)
    got, metrics = estimate(Advantages(config, return_lambda=1.0), Scores([2.0]), samples, batch)
    assert got.returns_T is not None and got.returns_T.tolist() == [0, 0, 2, 2, 2]
    deltas = torch.tensor([-0.25, 0.75, 1.0])
    expected = (deltas - deltas.mean()) / deltas.std()
    assert got.advantages_T is not None
    torch.testing.assert_close(got.advantages_T[mask_T], expected, rtol=1e-5, atol=1e-6)
    assert metrics == {"critic/explained_variance": 0.0}


def make_batch() -> tuple[Tensor, TrainBatch]:
    generator = torch.Generator().manual_seed(1)
    values, old, returns = torch.randn(3, 12, generator=generator, dtype=torch.float64)
    mask_T = torch.rand(12, generator=generator) > 0.3
    old[~mask_T] = torch.nan
    return values, TrainBatch(torch.arange(12), mask_T, (12,), values_T=old, returns_T=returns)


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_the_critics_loss_and_gradient(clip: float) -> None:
    values, batch = make_batch()
    values.requires_grad_()
    loss_T, metrics = value_loss(values, batch, clip=clip)
    assert batch.values_T is not None and batch.returns_T is not None
    expected, slopes, num_clipped = [], [], 0
    rows = zip(values.tolist(), batch.values_T.tolist(), batch.returns_T.tolist(), strict=True)
    for (value, old, target), trained in zip(rows, batch.loss_mask_T.tolist(), strict=True):
        bounded = min(max(value, old - clip), old + clip) if clip else value
        is_clipped = (bounded - target) ** 2 > (value - target) ** 2
        loss = 0.5 * max((value - target) ** 2, (bounded - target) ** 2)
        expected.append(loss if trained else 0.0)
        slopes.append(value - target if trained and not is_clipped else 0.0)
        num_clipped += trained and is_clipped
    assert loss_T.tolist() == pytest.approx(expected, abs=1e-12)
    (gradient,) = torch.autograd.grad(loss_T.sum(), values)
    assert gradient.tolist() == pytest.approx(slopes, abs=1e-12)
    assert float(metrics["clipped_share"].sum()) == num_clipped
    assert (num_clipped > 0) == (clip > 0)


def explained(values_R: Tensor, returns_R: Tensor) -> float:
    values_R, returns_R = values_R.double(), returns_R.double()
    return explained_variance(
        Moments.from_values(returns_R - values_R), Moments.from_values(returns_R)
    )


def test_explained_variance() -> None:
    returns = torch.tensor([0.0, 1.0, 2.0])
    assert explained(returns, returns) == 1.0
    assert explained(torch.full((3,), 7.0), returns) == 0.0
    assert explained(-returns, returns) == pytest.approx(-3.0)
    assert explained(returns, torch.ones(3)) == 0.0


def test_one_return_explains_nothing() -> None:
    one = torch.tensor([2.0])
    assert explained(one, one) == 0.0
    assert explained(torch.empty(0), torch.empty(0)) == 0.0
    assert explained(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])) == pytest.approx(0.75)
