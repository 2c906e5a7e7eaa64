"""Turns outcomes of samples into an advantage per response token. One function per algorithm.

Each function returns advantages_R, float32; float64 if they are yet to be normalized over a step.
Axes: N samples, R response tokens of all samples end to end, M tokens of the longest sample of a
group; see outcomes.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mcore_rl.algo.moments import Moments, standardize
from mcore_rl.algo.outcomes import Groups, Outcomes
from mcore_rl.algo.preferences import Likelihoods, pairs_of_groups, preference_weights
from mcore_rl.algo.registry import Needs, advantages
from mcore_rl.algo.values import estimate_gae
from mcore_rl.config import AlgorithmConfig, PreferenceConfig

STD_EPS = 1e-6
"""Added to the standard deviation of a group."""
WEIGHT_EPS = 1e-8
"""Added to a sum of weights."""


@advantages.register("grpo", Needs(others=True), reads=(), sees="samples")
def grpo(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-6) within each group.

    GRPO, arXiv:2402.03300, section 4.1.2. std is the sample standard deviation (divided by G - 1).
    A group of one, or of equal rewards, gets 0.
    """
    return outcomes.spread(_standardize(Groups.from_ids(outcomes.group_N), outcomes.scores_N))


@advantages.register("dr_grpo", Needs(others=True), reads=(), sees="samples")
def dr_grpo(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """A_i = r_i - mean(r) within each group; Dr. GRPO, arXiv:2503.20783, section 3.2."""
    return outcomes.spread(Groups.from_ids(outcomes.group_N).center(outcomes.scores_N))


@advantages.register("rloo", Needs(others=True), reads=(), sees="samples")
def rloo(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """A_i = r_i - mean of the group's other rewards; RLOO, arXiv:2402.14740, section 3.2.

    A group of one gets 0: it has nothing to be compared with.
    """
    groups = Groups.from_ids(outcomes.group_N)
    sizes_N = groups.sizes_N
    return outcomes.spread(groups.center(outcomes.scores_N) * sizes_N / (sizes_N - 1).clamp(min=1))


@advantages.register("opo", Needs(others=True), reads=(), sees="samples")
def opo(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """A_i = r_i - sum(l r) / sum(l) within each group, l the lengths.

    OPO, arXiv:2505.23585, section 3. This baseline has the least variance if a gradient's norm
    grows with the length. A group of one gets 0.
    """
    groups = Groups.from_ids(outcomes.group_N)
    return outcomes.spread(groups.center(outcomes.scores_N, outcomes.lens_N.double()))


@advantages.register("gpg", Needs(others=True), reads=(), sees="samples")
def gpg(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """A_i = N / (samples in groups with unequal rewards) * (r_i - mean(r)).

    GPG, arXiv:2504.02546, eq. 6. Groups of equal rewards add nothing to the gradient; the factor
    makes up for them.
    """
    groups = Groups.from_ids(outcomes.group_N)
    centered_N = groups.center(outcomes.scores_N)
    num_with_signal = (groups.sum(centered_N.abs()) > 0).sum().clamp(min=1)
    return outcomes.spread(centered_N * len(centered_N) / num_with_signal)


@advantages.register("grpo_pass_k", Needs(others=True), reads=(), sees="samples")
def grpo_pass_k(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """The best of each group gets (r_best - r_second) / (std(r) + 1e-6), the others 0.

    This is the leave-one-out gradient of the group's best reward, arXiv:2503.19595, section 3,
    scaled as in GRPO. If two samples share the best reward, or the group has one sample, all get 0.
    """
    groups = Groups.from_ids(outcomes.group_N)
    scores_N = outcomes.scores_N
    order_N = scores_N.argsort(descending=True, stable=True)
    order_N = order_N[groups.index_N[order_N].argsort(stable=True)]  # by group, the best first
    first_G = groups.sizes_G.long().cumsum(0) - groups.sizes_G.long()
    has_two_G = groups.sizes_G > 1
    best_G = order_N[first_G[has_two_G]]
    second_G = order_N[first_G[has_two_G] + 1]
    advantages_N = torch.zeros_like(scores_N)
    advantages_N[best_G] = scores_N[best_G] - scores_N[second_G]
    return outcomes.spread(advantages_N / (groups.std(groups.center(scores_N)) + STD_EPS))


@advantages.register(
    "reinforce_plus_plus", reads=("algorithm.gamma",), sees="groups", normalized=True
)
def reinforce_plus_plus(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """The rewards to go, discounted by `algorithm.gamma`; normalized over all tokens of the step.

    REINFORCE++, arXiv:2501.03262, section 3.2: no critic and no group.
    """
    return outcomes.rewards_to_go(config.gamma)


@advantages.register("reinforce_plus_plus_baseline", Needs(others=True), reads=(), sees="samples")
def reinforce_plus_plus_baseline(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """r_i - mean(r) in each group, normalized over all tokens; arXiv:2501.03262, section 3.3."""
    centered_N = Groups.from_ids(outcomes.group_N).center(outcomes.scores_N)
    return outcomes.spread(_normalize_over_tokens(centered_N, outcomes.lens_N))


@advantages.register(
    "gae",
    Needs(critic=True),
    reads=("algorithm.gamma", "algorithm.gae_lambda", "algorithm.bootstrap_truncated"),
    sees="groups",
    normalized=True,
)
def gae(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """Generalized advantage estimates; normalized over all tokens of the step.

    PPO, arXiv:1707.06347, eq. 11. The estimate (algo/values.py) uses `algorithm.gamma`,
    `algorithm.gae_lambda` and, with `algorithm.bootstrap_truncated`, the values of the last states
    of samples that were cut off.
    """
    return estimate_gae(outcomes, config.gamma, config.gae_lambda)


@advantages.register("gdpo", Needs(parts=True, others=True), reads=(), sees="samples")
def gdpo(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """The weighted sum of each part's own GRPO advantages, normalized over all tokens.

    GDPO, arXiv:2601.05242: a part of large numbers does not drown another. Parts and weights come
    from the recipe's reward. What else a reward has, as a KL penalty or one of length, is a part of
    weight 1.
    """
    parts = outcomes.parts
    if not parts:
        raise ValueError(
            "algorithm.advantage=gdpo needs rewards of several parts: set reward.parts"
        )
    groups = Groups.from_ids(outcomes.group_N)
    advantages_N = torch.zeros(len(outcomes.group_N), dtype=torch.float64)
    rest_N = outcomes.scores_N - sum(weight * values_N.double() for weight, values_N in parts)
    for weight, values_N in [*parts, (1.0, rest_N)]:
        advantages_N += weight * _standardize(groups, values_N.double())
    return outcomes.spread(_normalize_over_tokens(advantages_N, outcomes.lens_N))


@advantages.register("remax", Needs(greedy_baseline=True), reads=(), sees="groups")
def remax(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """The rewards to go minus the reward of the greedy response.

    ReMax, arXiv:2310.10505, algorithm 1.
    """
    if outcomes.greedy_N is None:
        raise ValueError("algorithm.advantage=remax needs the rewards of greedy responses")
    return (outcomes.rewards_to_go(1.0) - outcomes.spread(outcomes.greedy_N.double())).float()


@advantages.register("tir_optimal_token_baseline", Needs(sum_squares=True), reads=(), sees="groups")
@advantages.register("optimal_token_baseline", Needs(sum_squares=True), reads=(), sees="groups")
def optimal_token_baseline(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """G_t - sum(G_t W_t) / sum(W_t) over the samples of the group that reach token t.

    G_t is the reward to go. W_t sums 1 - 2 p + sum(p^2) over the tokens up to t; each term is the
    squared norm of the gradient of a token's log-prob by the logits, times the square of its
    importance weight, if `algorithm.correction.weight` gives it one. This is the baseline of least
    variance for each token. A token that only one sample reaches has no baseline.

    arXiv:2602.07078. t counts the tokens that the policy sampled, over all turns, as in verl's
    tir_optimal_token_baseline (verl/trainer/ppo/core_algos.py), so both names are one function.
    """
    if outcomes.energy_R is None:
        raise ValueError(
            f"algorithm.advantage={config.advantage} needs sums of squared probabilities"
        )
    lens = outcomes.lens_N.tolist()
    to_go_R = outcomes.rewards_to_go(1.0)
    to_go_of = to_go_R.split(lens)
    energy_of = outcomes.energy_R.split(lens)
    for members in Groups.from_ids(outcomes.group_N).members:
        to_go = [to_go_of[n] for n in members]
        baseline_M = _optimal_baseline(to_go, [energy_of[n] for n in members])
        for of_sample in to_go:  # a view of to_go_R, which keeps the difference
            of_sample -= baseline_M[: len(of_sample)]
    return to_go_R.float()


def _optimal_baseline(to_go: Sequence[Tensor], energy: Sequence[Tensor]) -> Tensor:
    """Return float64 [M], the baseline of each token of a group; M: tokens of its longest sample.

    `to_go` and `energy` have a vector per sample.
    """
    weights_NM = pad_sequence([values.double().cumsum(0) for values in energy], batch_first=True)
    to_go_NM = pad_sequence(list(to_go), batch_first=True)
    lens_N = torch.tensor([len(values) for values in to_go])
    num_reaching_M = (torch.arange(weights_NM.shape[1]) < lens_N[:, None]).sum(0)
    baseline_M = (weights_NM * to_go_NM).sum(0) / (weights_NM.sum(0) + WEIGHT_EPS)
    return torch.where(num_reaching_M > 1, baseline_M, 0.0)


@advantages.register(
    "dpo", Needs(pairs=True, others=True, old_logprobs=True), reads=(), sees="samples"
)
def dpo(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """Minus the gradient of the pairs' loss by each response's log-prob.

    Online DPO, arXiv:2402.04792. Any two samples of a group that differ in reward are a pair;
    `algorithm.preference` chooses the loss (preferences.py). Samples whose group has equal rewards
    get 0.
    """
    weights_N, _ = weights_of_groups(outcomes, config.preference)
    return outcomes.spread(weights_N)


def weights_of_groups(
    outcomes: Outcomes, config: PreferenceConfig
) -> tuple[Tensor, dict[str, float]]:
    """Return (weights_N, metrics) of the pairs within each group, as preference_weights does."""
    logprobs_N = outcomes.sum_of("logprobs_R")
    if logprobs_N is None:
        raise ValueError("algorithm.advantage=dpo needs log-probs of the policy")
    likelihoods = Likelihoods(logprobs_N, outcomes.lens_N, outcomes.sum_of("ref_logprobs_R"))
    return preference_weights(
        likelihoods, pairs_of_groups(outcomes.scores_N, outcomes.group_N), config
    )


@advantages.register(
    "distillation",
    Needs(teacher=True, old_logprobs=True),
    reads=("algorithm.reward_coef",),
    sees="groups",
)
def distillation(outcomes: Outcomes, config: AlgorithmConfig) -> Tensor:
    """log teacher - log policy of each token, plus `algorithm.reward_coef` times GRPO's advantage.

    This is the policy gradient of each token's own reverse KL(policy || teacher), without the
    effect on later tokens: on-policy distillation,
    https://thinkingmachines.ai/blog/on-policy-distillation, which is GKD, arXiv:2306.13649, section
    3, on policy and with reverse KL.
    """
    return (teacher_log_ratio(outcomes) + config.reward_coef * grpo(outcomes, config)).float()


def teacher_log_ratio(outcomes: Outcomes) -> Tensor:
    """float64 [R], log teacher - log policy; minus its mean over samples is the reverse KL."""
    if outcomes.teacher_logprobs_R is None or outcomes.logprobs_R is None:
        raise ValueError(
            "algorithm.advantage=distillation needs log-probs of the policy and of a teacher"
        )
    return outcomes.teacher_logprobs_R.double() - outcomes.logprobs_R.double()


def _standardize(groups: Groups, values_N: Tensor) -> Tensor:
    """(x - mean(x)) / (std(x) + 1e-6) within each group."""
    centered_N = groups.center(values_N)
    return centered_N / (groups.std(centered_N) + STD_EPS)


def normalize(values_R: Tensor) -> Tensor:
    """float32 (x - mean) / sqrt(var + 1e-8), var divided by R - 1. Equal values get exactly 0."""
    return standardize(values_R, Moments.from_values(values_R)).float()


def _normalize_over_tokens(values_N: Tensor, lens_N: Tensor) -> Tensor:
    """float64 [N], `normalize` of the tokens that all have the value of their sample."""
    return standardize(values_N, Moments.from_values(values_N, lens_N.double()))
