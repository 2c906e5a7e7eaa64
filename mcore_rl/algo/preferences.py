"""Computes the loss of pairs of a preferred and a rejected response, as a weight per sequence.

The loss depends on the policy only through the log-probs of whole sequences. Once these are known,
its gradient is one weight per sequence: -weight * (log-prob of the tokens) has the gradient of the
published loss. This holds however sequences are cut into micro-batches, and a sequence may be in
any number of pairs.

Axes: N sequences, P pairs, T tokens of all sequences end to end, G samples of one prompt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mcore_rl.algo.registry import Needs, Registry
from mcore_rl.config import PreferenceConfig

PairLoss = Callable[[Tensor, PreferenceConfig], Tensor]
"""margins_P (implicit reward of the chosen minus that of the rejected response), options -> loss_P.
"""

PAIR_LOSSES: Registry[PairLoss] = Registry("algorithm.preference.loss")
_REFERENCE = Needs(reference=True)
_SMOOTHING = "algorithm.preference.label_smoothing"
_MARGIN = "algorithm.preference.target_margin"


@dataclass(frozen=True)
class Pairs:
    """chosen_P and rejected_P: int64, indices of sequences. weights_P: float64, each pair's weight
    in the loss.
    """

    chosen_P: Tensor
    rejected_P: Tensor
    weights_P: Tensor


@dataclass(frozen=True)
class Likelihoods:
    """float64 [N] each: the response's log-prob by the policy, its tokens, its log-prob by the
    reference.
    """

    logprobs_N: Tensor
    lens_N: Tensor
    ref_logprobs_N: Tensor | None = None


@PAIR_LOSSES.register("dpo", _REFERENCE, reads=(_SMOOTHING,))
def dpo(margins_P: Tensor, config: PreferenceConfig) -> Tensor:
    """-log sigmoid(margin); DPO, arXiv:2305.18290, eq. 7.

    With label_smoothing e it is -(1 - e) log sigmoid(margin) - e log sigmoid(-margin), for data
    with a share e of wrong labels; cDPO, section 3 of E. Mitchell's note
    https://ericmitchell.ai/cdpo.pdf.
    """
    smoothing = config.label_smoothing
    return -(1 - smoothing) * logsigmoid(margins_P) - smoothing * logsigmoid(-margins_P)


@PAIR_LOSSES.register("ipo", _REFERENCE, reads=())
def ipo(margins_P: Tensor, config: PreferenceConfig) -> Tensor:
    """(h - 1 / (2 beta))^2, h = margin / beta; IPO, arXiv:2310.12036, eq. 17, whose tau is beta
    here.

    h uses sums over tokens, as published; TRL uses means over tokens.
    """
    return (margins_P / config.beta - 1 / (2 * config.beta)).square()


@PAIR_LOSSES.register("hinge", _REFERENCE, reads=())
def hinge(margins_P: Tensor, config: PreferenceConfig) -> Tensor:
    """max(0, 1 - margin); SLiC with a reference, arXiv:2309.06657, eq. 10."""
    return (1 - margins_P).clamp(min=0)


@PAIR_LOSSES.register("simpo", reads=(_SMOOTHING, _MARGIN))
def simpo(margins_P: Tensor, config: PreferenceConfig) -> Tensor:
    """-log sigmoid(margin - target_margin), without a reference; SimPO, arXiv:2405.14734, eq. 6."""
    return dpo(margins_P - config.target_margin, config)


def needs_reference(config: PreferenceConfig) -> bool:
    """Return whether the chosen loss compares the policy with a reference.

    Raises ValueError naming the option if the loss is unknown.
    """
    return PAIR_LOSSES.needs(config.loss).reference


def implicit_rewards(likelihoods: Likelihoods, config: PreferenceConfig) -> Tensor:
    """float64 [N]: beta log(policy / reference); for simpo, beta times the mean log-prob of the
    tokens.
    """
    if not needs_reference(config):
        return config.beta * likelihoods.logprobs_N / likelihoods.lens_N.clamp(min=1)
    if likelihoods.ref_logprobs_N is None:
        raise ValueError(
            f"algorithm.preference.loss={config.loss} needs log-probs of the reference"
        )
    return config.beta * (likelihoods.logprobs_N - likelihoods.ref_logprobs_N)


def preference_weights(
    likelihoods: Likelihoods, pairs: Pairs, config: PreferenceConfig
) -> tuple[Tensor, dict[str, float]]:
    """Return (weights_N, metrics); a weight is minus the gradient of the loss by the sequence's
    log-prob.

    The loss is the sum over pairs of weight * (loss - nll_coef * mean log-prob of the chosen
    response's tokens); the second term is that of Llama 3, arXiv:2407.21783, section 4.1.4.
    """
    logprobs_N = likelihoods.logprobs_N.detach().requires_grad_()
    lens_N = likelihoods.lens_N.clamp(min=1)
    rewards_N = implicit_rewards(
        Likelihoods(logprobs_N, lens_N, likelihoods.ref_logprobs_N), config
    )
    chosen_P = pairs.chosen_P
    rejected_P = pairs.rejected_P
    margins_P = rewards_N[chosen_P] - rewards_N[rejected_P]
    nll_P = -logprobs_N[chosen_P] / lens_N[chosen_P]
    loss_P = PAIR_LOSSES[config.loss](margins_P, config) + config.nll_coef * nll_P
    loss = (pairs.weights_P * loss_P).sum()
    (gradient_N,) = torch.autograd.grad(loss, logprobs_N)
    total = pairs.weights_P.sum().clamp(min=1e-12)
    values = {
        "accuracy": (margins_P > 0).double(),
        "margin": margins_P,
        "chosen_reward": rewards_N[chosen_P],
        "rejected_reward": rewards_N[rejected_P],
        "chosen_logprob": logprobs_N[chosen_P],
        "rejected_logprob": logprobs_N[rejected_P],
    }
    metrics = {"preference/loss": float(loss.detach())}
    for name, value_P in values.items():
        weighted_mean = (pairs.weights_P * value_P).detach().sum() / total
        metrics[f"preference/{name}"] = float(weighted_mean)
    return -gradient_N, metrics


def pairs_by_turns(num_sequences: int) -> Pairs:
    """Pair sequences 0, 2, ... (chosen) with 1, 3, ... (rejected), all of equal weight."""
    index_N = torch.arange(num_sequences)
    num_pairs = num_sequences // 2
    weights_P = torch.full((num_pairs,), 1 / num_pairs, dtype=torch.float64)
    return Pairs(index_N[::2], index_N[1::2], weights_P)


def pairs_of_groups(rewards_N: Tensor, group_N: Tensor) -> Pairs:
    """Pair any two samples of a group that differ in reward; the better one is chosen.

    The loss is the mean over a group's pairs, then over the groups that have pairs. With two
    samples per prompt it is online DPO, arXiv:2402.04792, algorithm 1.
    """
    sizes = group_N.unique(return_counts=True)[1].tolist()
    pairs_by_group: list[tuple[Tensor, Tensor, Tensor]] = []
    for index_G in group_N.argsort(stable=True).split(sizes):
        rewards_G = rewards_N[index_G]
        chosen, rejected = (rewards_G[:, None] > rewards_G[None]).nonzero(as_tuple=True)
        if len(chosen):
            shares = torch.ones(len(chosen)).double() / len(chosen)
            pairs_by_group.append((index_G[chosen], index_G[rejected], shares))
    if not pairs_by_group:
        return Pairs(torch.zeros(0).long(), torch.zeros(0).long(), torch.zeros(0).double())
    chosen_P, rejected_P, shares_P = map(torch.cat, zip(*pairs_by_group, strict=True))
    return Pairs(chosen_P, rejected_P, shares_P / len(pairs_by_group))


def best_and_worst(
    rewards_G: Sequence[float], texts_G: Sequence[str], num_pairs: int
) -> list[tuple[int, int]]:
    """Return up to `num_pairs` (chosen, rejected) indices among the samples of one prompt.

    The best sample is paired with the worst, the second best with the second worst, and so on.
    Equal texts count as one sample, and a sample is in at most one pair.
    """
    first: dict[str, int] = {}
    for i, text in enumerate(texts_G):
        first.setdefault(text, i)
    best_first = sorted(sorted(first.values()), key=lambda i: -rewards_G[i])
    better_half = best_first[: len(best_first) // 2]
    candidates = zip(better_half, reversed(best_first), strict=False)
    pairs = [(best, worst) for best, worst in candidates if rewards_G[best] > rewards_G[worst]]
    return pairs[:num_pairs]
