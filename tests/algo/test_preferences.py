"""Losses of pairs against the published ones in float64: value, gradient, metrics; and who is
paired.

The references write out each loss on the log-probs of tokens; ours gives a weight per sequence.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mcore_rl.algo.estimator import Advantages
from mcore_rl.algo.policy_loss import make_policy_loss
from mcore_rl.algo.preferences import (
    PAIR_LOSSES,
    Likelihoods,
    Pairs,
    best_and_worst,
    needs_reference,
    pairs_by_turns,
    pairs_of_groups,
    preference_weights,
)
from mcore_rl.batches.batch import select, with_loss_weights
from mcore_rl.config import AlgorithmConfig, PreferenceConfig
from mcore_rl.types import Prompt, Sample, TrainBatch, VersionSpan, WeightVersion
from mcore_rl.types.scores import Scores
from tests.support.laid_out import estimate, make_train_batch

LENS = (3, 5, 2, 6, 4, 1)
BETA, SMOOTHING, TARGET, NLL = 0.7, 0.1, 0.4, 0.3


def sums(values_T: Tensor) -> Tensor:
    return torch.stack([part.sum() for part in values_T.split(LENS)])


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    logprobs_T, ref_T = -torch.rand(2, sum(LENS), generator=generator, dtype=torch.float64) - 0.2
    return logprobs_T.requires_grad_(), ref_T


def published(name: str, logprobs_T: Tensor, ref_T: Tensor, pairs: list[tuple[int, int]]) -> Tensor:
    """Mean over pairs, written as in the papers, with policy and reference as probabilities of
    responses.
    """
    policy, reference = sums(logprobs_T).exp(), sums(ref_T).exp()
    losses = []
    for w, r in pairs:
        h = torch.log(policy[w] * reference[r] / (policy[r] * reference[w]))  # IPO, eq. 17
        if name == "dpo":
            losses.append(-torch.log(1 / (1 + torch.exp(-BETA * h))))
        elif name == "cdpo":
            p = 1 / (1 + torch.exp(-BETA * h))
            losses.append(-(1 - SMOOTHING) * p.log() - SMOOTHING * (1 - p).log())
        elif name == "ipo":
            losses.append((h - 0.5 / BETA) ** 2)
        elif name == "hinge":
            losses.append(F.relu(1 - BETA * h))
        else:
            mean_w, mean_l = (policy[i].log() / LENS[i] for i in (w, r))
            losses.append(
                -torch.log(1 / (1 + torch.exp(-(BETA * mean_w - BETA * mean_l - TARGET))))
            )
    return torch.stack(losses).mean()


CASES = {
    "dpo": PreferenceConfig("dpo", BETA),
    "cdpo": PreferenceConfig("dpo", BETA, label_smoothing=SMOOTHING),
    "ipo": PreferenceConfig("ipo", BETA),
    "hinge": PreferenceConfig("hinge", BETA),
    "simpo": PreferenceConfig("simpo", BETA, target_margin=TARGET),
}


def make_pairs(pairs: list[tuple[int, int]]) -> Pairs:
    chosen_P, rejected_P = torch.tensor(pairs).T
    return Pairs(
        chosen_P, rejected_P, torch.full((len(pairs),), 1 / len(pairs), dtype=torch.float64)
    )


def test_every_loss_is_compared_with_the_published_one() -> None:
    assert {config.loss for config in CASES.values()} == set(PAIR_LOSSES.names)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "pairs", [[(0, 1), (2, 3), (4, 5)], [(0, 1), (0, 2), (3, 1), (5, 4)]], ids=["apart", "shared"]
)
def test_value_and_gradient_are_the_published_ones(name: str, pairs: list[tuple[int, int]]) -> None:
    logprobs_T, ref_T = inputs()
    expected = published(name, logprobs_T, ref_T, pairs)
    (gradient_T,) = torch.autograd.grad(expected, logprobs_T)
    likelihoods = Likelihoods(sums(logprobs_T).detach(), torch.tensor(LENS), sums(ref_T))
    weights_N, metrics = preference_weights(likelihoods, make_pairs(pairs), CASES[name])
    assert metrics["preference/loss"] == pytest.approx(expected.item(), abs=1e-12)
    torch.testing.assert_close(
        -weights_N.repeat_interleave(torch.tensor(LENS)), gradient_T, rtol=0, atol=1e-12
    )


def test_numbers_of_a_pair_worked_out_by_hand() -> None:
    """log-ratios 2 and -1 at beta 0.5: margin 1.5, loss log(1 + exp(-1.5)), weight 0.5
    sigmoid(-1.5).
    """
    likelihoods = Likelihoods(
        torch.tensor([-4.0, -6.0]).double(),
        torch.tensor([2, 3]),
        torch.tensor([-6.0, -5.0]).double(),
    )
    weights_N, metrics = preference_weights(
        likelihoods, pairs_by_turns(2), PreferenceConfig("dpo", 0.5)
    )
    weight = 0.5 / (1 + math.exp(1.5))
    assert weights_N.tolist() == pytest.approx([weight, -weight], abs=1e-15)
    assert metrics == pytest.approx(
        {
            "preference/loss": math.log1p(math.exp(-1.5)),
            "preference/accuracy": 1.0,
            "preference/margin": 1.5,
            "preference/chosen_reward": 1.0,
            "preference/rejected_reward": -0.5,
            "preference/chosen_logprob": -4.0,
            "preference/rejected_logprob": -6.0,
        }
    )
    with_nll, metrics = preference_weights(
        likelihoods, pairs_by_turns(2), PreferenceConfig("dpo", 0.5, nll_coef=0.2)
    )
    assert with_nll.tolist() == pytest.approx([weight + 0.2 / 2, -weight], abs=1e-15)
    assert metrics["preference/loss"] == pytest.approx(math.log1p(math.exp(-1.5)) + 0.2 * 4 / 2)


def test_what_a_loss_lacks_is_refused() -> None:
    alone = Likelihoods(torch.zeros(2).double(), torch.ones(2).long())
    with pytest.raises(
        ValueError, match=r"algorithm.preference.loss=dpo needs log-probs of the reference"
    ):
        preference_weights(alone, pairs_by_turns(2), PreferenceConfig())
    weights_N, _ = preference_weights(alone, pairs_by_turns(2), PreferenceConfig("simpo"))
    assert weights_N.tolist() == [0.05, -0.05]
    with pytest.raises(
        ValueError, match=r"algorithm.preference.loss='dop' \(did you mean 'dpo'\?\)"
    ):
        make_policy_loss(AlgorithmConfig(preference=PreferenceConfig("dop")))


ONLINE = AlgorithmConfig(
    advantage="dpo",
    loss="policy_gradient",
    aggregation="token_sum",
    preference=PreferenceConfig("dpo", BETA),
)


def make_sample(prompt: int, index: int, num_tokens: int) -> Sample:
    spans = (VersionSpan(0, num_tokens, WeightVersion(0)),) if num_tokens else ()
    return Sample(
        Prompt(prompt, (1,), (), "unit", ""),
        index,
        (2,) * num_tokens,
        (-1.0,) * num_tokens,
        "stop",
        spans,
        "",
    )


def test_online_every_two_samples_of_a_group_that_differ_are_a_pair_however_the_batch_is_cut() -> (
    None
):
    """Prompts in any order, one without a pair, one sample without a token."""
    rewards, prompts, lens = (
        [1.0, 0.0, 0.5, 1.0, 0.0, 0.0, 1.0],
        [7, 3, 7, 9, 3, 7, 3],
        (3, 5, 2, 4, 6, 4, 0),
    )
    samples = [make_sample(p, i, n) for i, (p, n) in enumerate(zip(prompts, lens, strict=True))]
    generator = torch.Generator().manual_seed(2)
    batch = with_loss_weights(make_train_batch(samples), ONLINE.aggregation, 8)
    logprobs_T, ref_T = -torch.rand(2, sum(batch.lens_N), generator=generator, dtype=torch.float64)
    batch = replace(batch, old_logprobs_T=logprobs_T, ref_logprobs_T=ref_T)
    batch, metrics = estimate(Advantages(ONLINE), Scores(rewards), samples, batch)
    batch = replace(batch, ref_logprobs_T=None)

    leaf = logprobs_T.clone().requires_grad_()
    parts = (torch.where(batch.loss_mask_T, leaf - ref_T, 0.0)).split(batch.lens_N)
    h = [*(part.sum() for part in parts), torch.zeros(())]  # the empty response has log-ratio 0

    def pair(w: int, r: int) -> Tensor:
        return -F.logsigmoid(BETA * (h[w] - h[r]))

    of_7, of_3 = (pair(0, 2) + pair(0, 5) + pair(2, 5)) / 3, (pair(6, 1) + pair(6, 4)) / 2
    expected = (of_7 + of_3) / 2
    (gradient_T,) = torch.autograd.grad(expected, leaf)
    assert metrics["preference/loss"] == pytest.approx(expected.item())

    loss_fn = make_policy_loss(ONLINE)
    for cut in ([[0, 1, 2, 3, 4, 5]], [[0, 5], [2], [1, 3, 4]]):
        got_T = torch.zeros_like(gradient_T)
        index_T = replace(batch, token_ids_T=torch.arange(sum(batch.lens_N)))
        for chosen in cut:
            part, where_T = select(batch, chosen), select(index_T, chosen).token_ids_T
            got_T[where_T] = gradient_of_step(loss_fn, part, logprobs_T[where_T])
        torch.testing.assert_close(got_T, gradient_T, rtol=0, atol=1e-7)  # advantages are float32


def gradient_of_step(loss_fn, batch: TrainBatch, logprobs_T: Tensor) -> Tensor:
    leaf = logprobs_T.clone().requires_grad_()
    loss_T, _ = loss_fn(leaf, torch.zeros_like(leaf), batch)
    assert batch.loss_weights_T is not None
    (gradient_T,) = torch.autograd.grad((loss_T * batch.loss_weights_T).sum(), leaf)
    return gradient_T


def test_without_a_pair_there_is_no_gradient() -> None:
    pairs = pairs_of_groups(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0, 0, 1]))
    likelihoods = Likelihoods(
        torch.zeros(3).double(), torch.ones(3).long(), torch.zeros(3).double()
    )
    weights_N, metrics = preference_weights(likelihoods, pairs, PreferenceConfig())
    assert not weights_N.any() and metrics["preference/loss"] == 0


@pytest.mark.parametrize(
    ("rewards", "texts", "num_pairs", "pairs"),
    [
        ([0, 1, 0.5, 0], "abcd", 2, [(1, 3), (2, 0)]),
        ([0, 1, 0.5, 0], "abcd", 1, [(1, 3)]),
        ([1, 1, 1, 0], "aabc", 4, [(0, 3)]),
        ([1, 0, 1, 0], "abab", 4, [(0, 1)]),
        ([1, 1], "ab", 1, []),
        ([1], "a", 1, []),
        ([], "", 1, []),
        ([3, 2, 1], "abc", 4, [(0, 2)]),
    ],
)
def test_the_best_is_paired_with_the_worst_and_no_text_twice(
    rewards, texts, num_pairs, pairs
) -> None:
    assert best_and_worst(rewards, list(texts), num_pairs) == pairs


def test_only_simpo_compares_pairs_without_a_reference() -> None:
    compares = {name: needs_reference(PreferenceConfig(name)) for name in PAIR_LOSSES.names}
    assert compares == {"dpo": True, "hinge": True, "ipo": True, "simpo": False}
