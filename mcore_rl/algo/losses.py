"""Computes policy losses per token: turns tokens, ratios and advantages into loss_T and metrics_T.
Nothing is summed here.

`algorithm.loss` names a maker, which takes AlgorithmConfig and returns the loss with its constants
bound. Notation: w = exp(log_ratio) = policy / old policy, A is the advantage, sg() stops the
gradient.

gspo, luspo, gmpo and vespo have a ratio of the whole sequence: W is the product of w over the
sequence, |o| its length. They have the value and gradient of the published loss if
`algorithm.aggregation` is sequence_mean, vespo with token_mean.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mcore_rl.algo.covariance import pick_between, pick_largest
from mcore_rl.algo.registry import LossTokens, Metrics, Needs, PolicyLoss, losses
from mcore_rl.config import AlgorithmConfig

CLIPS = ("algorithm.clip_low", "algorithm.clip_high")
LOG_PRODUCTS = (math.log(1e-8), 20.0)
"""vespo holds the log of a sequence's ratio within these, as TRL does."""


@losses.register("ppo_clip", reads=(*CLIPS, "algorithm.dual_clip"))
def make_ppo_clip(config: AlgorithmConfig) -> PolicyLoss:
    return partial(ppo_clip, dual_clip=config.dual_clip, **clips_of(config))


def ppo_clip(
    tokens: LossTokens, *, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> tuple[Tensor, Metrics]:
    """-min(w A, clip(w, 1 - clip_low, 1 + clip_high) A); with dual_clip c, at most -c A where A <
    0.

    PPO, arXiv:1707.06347, eq. 7; per token as in GRPO, arXiv:2402.03300, eq. 3; clip_high >
    clip_low is DAPO's clip-higher, arXiv:2503.14476, section 3.1; dual clip is arXiv:1912.09729,
    eq. 5.
    """
    loss_T, metrics = clipped_surrogate(
        tokens.log_ratio_T, tokens.advantages_T, clip_low, clip_high
    )
    if dual_clip:
        bound_T = -dual_clip * tokens.advantages_T
        is_beyond_T = (tokens.advantages_T < 0) & (loss_T.detach() > bound_T)
        loss_T = torch.where(is_beyond_T, bound_T, loss_T)
        metrics["clip/dual_share"] = is_beyond_T.float()
    return loss_T, metrics


@losses.register("cispo", reads=CLIPS)
def make_cispo(config: AlgorithmConfig) -> PolicyLoss:
    return partial(cispo, **clips_of(config))


def cispo(tokens: LossTokens, *, clip_low: float, clip_high: float) -> tuple[Tensor, Metrics]:
    """-sg(clip(w, 1 - clip_low, 1 + clip_high)) A log policy: clipped tokens keep a gradient.

    CISPO, MiniMax-M1, arXiv:2506.13585, eq. 4.
    """
    ratio_T = tokens.log_ratio_T.detach().exp()
    weight_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    return -weight_T * tokens.advantages_T * tokens.logprobs_T, {
        "clip/low_share": (ratio_T < 1 - clip_low).float(),
        "clip/high_share": (ratio_T > 1 + clip_high).float(),
    }


@losses.register("sapo", reads=("algorithm.tau_positive", "algorithm.tau_negative"))
def make_sapo(config: AlgorithmConfig) -> PolicyLoss:
    return partial(sapo, tau_positive=config.tau_positive, tau_negative=config.tau_negative)


def sapo(tokens: LossTokens, *, tau_positive: float, tau_negative: float) -> tuple[Tensor, Metrics]:
    """-A 4 / tau sigmoid(tau (w - 1)), a soft gate instead of a clip; SAPO, arXiv:2511.20347, eq.
    5, 6.
    """
    tau_T = torch.where(tokens.advantages_T > 0, tau_positive, tau_negative)
    gate_T = 4 / tau_T * torch.sigmoid(tau_T * (tokens.log_ratio_T.exp() - 1))
    return -tokens.advantages_T * gate_T, {}


@losses.register("policy_gradient", reads=())
def make_policy_gradient(config: AlgorithmConfig) -> PolicyLoss:
    return policy_gradient


def policy_gradient(tokens: LossTokens) -> tuple[Tensor, Metrics]:
    """-A log policy, without a ratio to the old policy; REINFORCE, and GPG, arXiv:2504.02546, eq.
    5.
    """
    return -tokens.advantages_T * tokens.logprobs_T, {}


@losses.register("dro", reads=("algorithm.dro_beta",))
def make_dro(config: AlgorithmConfig) -> PolicyLoss:
    return partial(dro, beta=config.dro_beta)


def dro(tokens: LossTokens, *, beta: float) -> tuple[Tensor, Metrics]:
    """-A log policy + beta / 2 (log w)^2: a squared log ratio holds the policy near the old one.

    DRO, arXiv:2405.19107, taken token by token, with the old policy as its reference, and with the
    advantages of any choice instead of a learned value; as in verl's compute_policy_loss_dro
    (verl/trainer/ppo/core_algos.py).
    """
    penalty_T = beta / 2 * tokens.log_ratio_T.square()
    return penalty_T - tokens.advantages_T * tokens.logprobs_T, {}


@losses.register("dppo_tv", reads=(*CLIPS, "algorithm.max_ratio"))
def make_dppo_tv(config: AlgorithmConfig) -> PolicyLoss:
    return partial(dppo, divergence=binary_tv, max_ratio=config.max_ratio, **clips_of(config))


@losses.register("dppo_kl", reads=(*CLIPS, "algorithm.max_ratio"))
def make_dppo_kl(config: AlgorithmConfig) -> PolicyLoss:
    return partial(dppo, divergence=binary_kl, max_ratio=config.max_ratio, **clips_of(config))


def dppo(
    tokens: LossTokens,
    *,
    divergence: Callable[[Tensor, Tensor], Tensor],
    max_ratio: float,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Metrics]:
    """-sg(min(w, max_ratio)) A log policy on tokens whose divergence from the old policy is small
    enough.

    DPPO, arXiv:2602.04879, section 4: a token drops out if its probability has already moved by
    more than `clip_high` up (A > 0) or `clip_low` down (A <= 0), measured by `divergence`.
    """
    logprobs_T = tokens.logprobs_T.detach()
    log_ratio_T = tokens.log_ratio_T.detach()
    distance_T = divergence(logprobs_T, logprobs_T - log_ratio_T)
    is_above_T = (log_ratio_T > 0) & (distance_T > clip_high) & (tokens.advantages_T > 0)
    is_below_T = (log_ratio_T < 0) & (distance_T > clip_low) & (tokens.advantages_T <= 0)
    weight_T = log_ratio_T.exp().clamp(max=max_ratio).masked_fill(is_above_T | is_below_T, 0.0)
    return -weight_T * tokens.advantages_T * tokens.logprobs_T, {
        "clip/low_share": is_below_T.float(),
        "clip/high_share": is_above_T.float(),
    }


def binary_tv(logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    """Return |p - q|, the total variation if only "this token" and "another" are told apart."""
    return (logprobs_T.exp() - old_logprobs_T.exp()).abs()


def binary_kl(logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    """Return KL(old || policy) if only "this token" and "another" are told apart.

    1e-8 is added to both probabilities of "another".
    """
    p_T = logprobs_T.exp()
    q_T = old_logprobs_T.exp()
    return (
        q_T * (old_logprobs_T - logprobs_T)
        + (1 - q_T) * ((1 - q_T + 1e-8) / (1 - p_T + 1e-8)).log()
    )


@losses.register(
    "clip_cov",
    Needs(old_logprobs=True, held_back=pick_between),
    reads=(
        *CLIPS,
        "algorithm.covariance.share",
        "algorithm.covariance.low",
        "algorithm.covariance.high",
    ),
)
def make_clip_cov(config: AlgorithmConfig) -> PolicyLoss:
    return partial(clip_cov, **clips_of(config))


def clip_cov(tokens: LossTokens, *, clip_low: float, clip_high: float) -> tuple[Tensor, Metrics]:
    """PPO's clipped loss, 0 on the tokens held back; Clip-Cov, arXiv:2505.22617, eq. 11."""
    loss_T, metrics = clipped_surrogate(
        tokens.log_ratio_T, tokens.advantages_T, clip_low, clip_high
    )
    held_back_T = _get_held_back(tokens)
    return loss_T.masked_fill(held_back_T, 0.0), {
        **metrics,
        "clip/held_back_share": held_back_T.float(),
    }


@losses.register(
    "kl_cov",
    Needs(old_logprobs=True, held_back=pick_largest),
    reads=("algorithm.covariance.share", "algorithm.covariance.kl_coef"),
)
def make_kl_cov(config: AlgorithmConfig) -> PolicyLoss:
    return partial(kl_cov, kl_coef=config.covariance.kl_coef)


def kl_cov(tokens: LossTokens, *, kl_coef: float) -> tuple[Tensor, Metrics]:
    """-w A, plus kl_coef |log w| on the tokens held back; KL-Cov, arXiv:2505.22617, eq. 13."""
    held_back_T = _get_held_back(tokens)
    penalty_T = torch.where(held_back_T, kl_coef * tokens.log_ratio_T.abs(), 0.0)
    loss_T = -tokens.advantages_T * tokens.log_ratio_T.exp() + penalty_T
    return loss_T, {"clip/held_back_share": held_back_T.float()}


@losses.register("gspo", Needs(whole_samples=True), reads=CLIPS)
def make_gspo(config: AlgorithmConfig) -> PolicyLoss:
    return partial(gspo, **clips_of(config))


def gspo(tokens: LossTokens, *, clip_low: float, clip_high: float) -> tuple[Tensor, Metrics]:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s the geometric mean of w over the
    sequence.

    GSPO-token, arXiv:2507.18071, eq. 14: s_t = sg(s) policy / sg(policy). Clip ranges are about
    3e-4.
    """
    mean_T = tokens.sequence_mean(tokens.log_ratio_T.detach())
    log_ratio_T = mean_T + tokens.log_ratio_T - tokens.log_ratio_T.detach()
    return clipped_surrogate(log_ratio_T, tokens.advantages_T, clip_low, clip_high)


@losses.register("luspo", Needs(whole_samples=True), reads=CLIPS)
def make_luspo(config: AlgorithmConfig) -> PolicyLoss:
    return partial(luspo, **clips_of(config))


def luspo(tokens: LossTokens, *, clip_low: float, clip_high: float) -> tuple[Tensor, Metrics]:
    """|o| times GSPO's loss, so that each token of a long sequence weighs as much as one of a short
    one.

    LUSPO, arXiv:2602.05261. Clip ranges are about 2e-3.
    """
    loss_T, metrics = gspo(tokens, clip_low=clip_low, clip_high=clip_high)
    return tokens.sequence_sum(torch.ones_like(loss_T)) * loss_T, metrics


@losses.register("gmpo", Needs(whole_samples=True), reads=CLIPS)
def make_gmpo(config: AlgorithmConfig) -> PolicyLoss:
    return partial(gmpo, **clips_of(config))


def gmpo(tokens: LossTokens, *, clip_low: float, clip_high: float) -> tuple[Tensor, Metrics]:
    """-A times the geometric mean over the sequence of w, each clipped to exp(-clip_low) ..
    exp(clip_high).

    GMPO, arXiv:2507.20673, eq. 4: clipped on the side where PPO clips. Clip ranges are about 0.4.
    """
    log_ratio_T = tokens.log_ratio_T
    sign_T = tokens.advantages_T.sign()
    clipped_T = log_ratio_T.clamp(-clip_low, clip_high)
    kept_T = sign_T * torch.minimum(sign_T * log_ratio_T, sign_T * clipped_T)
    mean_T = tokens.sequence_mean(kept_T.detach())
    loss_T = -tokens.advantages_T * (mean_T + kept_T - kept_T.detach()).exp()
    log_ratio_T = log_ratio_T.detach()
    return loss_T, {
        "clip/low_share": ((log_ratio_T < -clip_low) & (sign_T < 0)).float(),
        "clip/high_share": ((log_ratio_T > clip_high) & (sign_T > 0)).float(),
    }


@losses.register(
    "vespo",
    Needs(whole_samples=True),
    reads=tuple(
        f"algorithm.vespo.{name}_{sign}"
        for name in ("power", "decay")
        for sign in ("positive", "negative")
    ),
)
def make_vespo(config: AlgorithmConfig) -> PolicyLoss:
    options = config.vespo
    return partial(
        vespo,
        positive=(options.power_positive, options.decay_positive),
        negative=(options.power_negative, options.decay_negative),
    )


def vespo(
    tokens: LossTokens, *, positive: tuple[float, float], negative: tuple[float, float]
) -> tuple[Tensor, Metrics]:
    """-sg(W^power exp(decay (1 - W))) A log policy: sequences lose weight as W leaves 1.

    VESPO, arXiv:2602.10693, section 3.4. `negative` is the (power, decay) of tokens with A < 0,
    `positive` of all others.
    """
    log_product_T = tokens.sequence_sum(tokens.log_ratio_T.detach()).clamp(*LOG_PRODUCTS)
    is_negative_T = tokens.advantages_T < 0
    power_T = torch.where(is_negative_T, negative[0], positive[0])
    decay_T = torch.where(is_negative_T, negative[1], positive[1])
    weight_T = (power_T * log_product_T + decay_T * (1 - log_product_T.exp())).exp()
    return -weight_T * tokens.advantages_T * tokens.logprobs_T, {"clip/weight": weight_T}


def clipped_surrogate(
    log_ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Metrics]:
    """-min(w A, clip(w, 1 - clip_low, 1 + clip_high) A); a token counts as clipped if its gradient
    is 0.
    """
    ratio_T = log_ratio_T.exp()
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    loss_T = torch.maximum(-advantages_T * ratio_T, -advantages_T * clipped_T)
    ratio_T = ratio_T.detach()
    return loss_T, {
        "clip/low_share": ((ratio_T < 1 - clip_low) & (advantages_T < 0)).float(),
        "clip/high_share": ((ratio_T > 1 + clip_high) & (advantages_T > 0)).float(),
    }


def _get_held_back(tokens: LossTokens) -> Tensor:
    if tokens.held_back_T is None:
        raise ValueError("this loss needs batch.held_back_T, see mcore_rl.algo.covariance")
    return tokens.held_back_T


def clips_of(config: AlgorithmConfig) -> dict[str, float]:
    """Return both clip ranges by name."""
    return {"clip_low": config.clip_low, "clip_high": config.clip_high}
