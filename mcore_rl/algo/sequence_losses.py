"""Computes policy losses with a ratio of the whole sequence, token by token like losses.py.

They have the value and gradient of the published loss if `algorithm.aggregation` is sequence_mean,
vespo with token_mean. Notation as in losses.py; W is the product of w over the sequence, |o| its
length.
"""

import math
from functools import partial

import torch
from torch import Tensor

from mcore_rl.algo.loss_tokens import LossTokens, Metrics
from mcore_rl.algo.losses import CLIPS, clipped_surrogate, clips_of
from mcore_rl.algo.registry import Needs, PolicyLoss, losses
from mcore_rl.config import AlgorithmConfig

LOG_PRODUCTS = (math.log(1e-8), 20.0)
"""vespo holds the log of a sequence's ratio within these, as TRL does."""


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
