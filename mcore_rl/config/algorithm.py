"""Options of the algorithm: advantages, loss, KL, correction (docs/algorithms.md)."""

from dataclasses import dataclass, field
from typing import Literal

from mcore_rl.config.bounds import Options, bounded


@dataclass
class KLConfig(Options, group="algorithm.kl"):
    coef: float = bounded(0.0, ge=0)
    """Weight of the KL between policy and reference; 0: none, and no reference model."""
    estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"] = "k3"
    """Estimator of the KL (docs/algorithms.md); a + gives it the gradient of the KL itself."""
    in_reward: bool = False
    """Subtract coef * KL of the old policy from each token's reward, instead of adding it to
    the loss."""
    target: float = bounded(0.0, ge=0)
    """in_reward: KL per token, in nats, toward which the coefficient is steered, starting at
    `coef`; 0: fixed."""
    horizon: int = bounded(10000, ge=1)
    """target: number of samples over which the coefficient may change by at most a fifth."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target and not (self.in_reward and self.coef > 0):
            raise ValueError(
                f"algorithm.kl.target={self.target} with in_reward={self.in_reward} and"
                f" coef={self.coef}: only a coefficient above 0 of a KL in the reward is steered"
            )


@dataclass
class CorrectionConfig(Options, group="algorithm.correction"):
    """Importance weights for samples that the engine drew with other probabilities than the
    trainer's.
    """

    weight: Literal["none", "token", "sequence", "geometric"] | None = None
    """Multiply each token's loss by the ratio trainer / engine. token: the token's own ratio;
    sequence: the product of the ratios of its sequence; geometric: their geometric mean. None:
    not chosen, which counts as none, and is refused unless rollout.mode=sync."""
    bound: Literal["truncate", "mask"] = "truncate"
    """truncate: weights above `high` become `high`; mask: weights outside `low` to `high`
    become 0."""
    low: float = bounded(0.0, ge=0)
    """bound=mask: the least weight that stays."""
    high: float = bounded(2.0, gt=0)
    """The largest weight that stays."""
    normalize: bool = False
    """Divide the weights by their mean over the optimizer step: over its tokens (weight=token) or
    over its samples."""
    reject: Literal["none", "token", "sequence", "sequence_sum", "sequence_max"] = "none"
    """Leave out tokens, or whole sequences, whose KL(engine || trainer) is too large. sequence: by
    the mean over its tokens; sequence_sum: by their sum; sequence_max: by its worst token."""
    reject_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL (algorithm.kl.estimator); k1 is log engine - log trainer."""
    reject_above: float = bounded(0.0, ge=0)
    """The largest KL that is not rejected, in nats."""
    reject_below: float | None = bounded(None, le=0)
    """k1, which may be negative: the least that is not rejected, in nats; null: -reject_above."""
    bypass: bool = False
    """Use the engine's log-probs as those of the old policy. This saves the pass for them, and the
    policy loss has a single ratio, policy / engine."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low <= 1 <= self.high:
            raise ValueError(
                f"algorithm.correction.low={self.low} and high={self.high}: a weight of 1 must lie"
                " between"
            )
        if self.reject != "none" and self.reject_above == 0:
            raise ValueError(
                "algorithm.correction.reject_above=0 with"
                f" algorithm.correction.reject={self.reject}: everything would be rejected; set a"
                " KL in nats"
            )
        if self.bypass and (self.is_weighted or self.reject != "none"):
            raise ValueError(
                f"algorithm.correction.bypass=true with weight={self.weight_name} and"
                f" reject={self.reject}: there is no third policy between engine and trainer; set"
                " both to none"
            )

    @property
    def reject_range(self) -> tuple[float, float]:
        """Return the least and the largest estimate that is not rejected, in nats."""
        below = -self.reject_above if self.reject_below is None else self.reject_below
        return below, self.reject_above

    @property
    def weight_name(self) -> str:
        """Return the name of the weight, "none" where the recipe gives none."""
        return self.weight or "none"

    @property
    def is_weighted(self) -> bool:
        """Return whether tokens have importance weights."""
        return self.weight_name != "none"

    @property
    def is_on(self) -> bool:
        """Return whether the loss uses the engine's probabilities at all."""
        return self.is_weighted or self.bypass

    @property
    def is_chosen(self) -> bool:
        """Return whether the recipe says by name what corrects for stale samples, if anything."""
        return self.weight is not None or self.bypass


@dataclass
class CovarianceConfig(Options, group="algorithm.covariance"):
    """For algorithm.loss=clip_cov and kl_cov: tokens whose advantage and log-prob covary most."""

    share: float = bounded(0.0002, gt=0, le=1)
    """Share of the mini-batch's tokens that are held back."""
    low: float = 1.0
    """clip_cov picks them among tokens whose covariance lies between `low` and `high`."""
    high: float = 5.0
    """The upper end of that range."""
    kl_coef: float = bounded(1.0, ge=0)
    """kl_cov picks the tokens of largest covariance, and adds this times |log ratio| to their
    loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low >= self.high:
            raise ValueError(
                f"algorithm.covariance.low={self.low} is not below"
                f" algorithm.covariance.high={self.high}"
            )


@dataclass
class VespoConfig(Options, group="algorithm.vespo"):
    """For algorithm.loss=vespo: a sequence of ratio W has the weight W^power exp(decay (1 - W))."""

    power_positive: float = bounded(2.0, ge=0)
    """Power of tokens with positive advantage."""
    decay_positive: float = bounded(3.0, gt=0)
    """Decay of tokens with positive advantage."""
    power_negative: float = bounded(3.0, ge=0)
    """Power of tokens with negative advantage."""
    decay_negative: float = bounded(2.0, gt=0)
    """Decay of tokens with negative advantage."""


@dataclass
class PreferenceConfig(Options, group="algorithm.preference"):
    """The loss on pairs of responses, for `mcore-rl dpo` and algorithm.advantage=dpo
    (algo/preferences.py).
    """

    loss: str = "dpo"
    """A registered loss of pairs: dpo, ipo, simpo and others (docs/algorithms.md)."""
    beta: float = bounded(0.1, gt=0)
    """Scale of the implicit rewards."""
    label_smoothing: float = bounded(0.0, ge=0, lt=0.5)
    """dpo, simpo: assumed share of pairs whose labels are swapped."""
    target_margin: float = bounded(0.0, ge=0)
    """simpo: margin by which the chosen response's implicit reward should exceed the rejected
    one's."""
    nll_coef: float = bounded(0.0, ge=0)
    """Weight of the chosen responses' own negative log-likelihood, mean over tokens."""


@dataclass
class AlgorithmConfig(Options, group="algorithm"):
    path: str = ""
    """Python file that registers advantages and losses of your own (docs/algorithms.md); a relative
    path is looked up from the working directory, then beside recipes/."""
    advantage: str = "grpo"
    """A registered advantage: grpo, gae and others (docs/algorithms.md), or one of `path`."""
    role_part: str = ""
    """A number of the reward function that says which role a sample plays: samples of a prompt are
    compared with those of the same role, as in CURE; empty: with all."""
    gamma: float = bounded(1.0, gt=0, le=1)
    """Discount of later rewards, for advantages that are computed token by token."""
    gae_lambda: float = bounded(1.0, ge=0, le=1)
    """gae: 1 takes the whole future from the rewards, 0 all but the next token's from the
    critic."""
    bootstrap_truncated: bool = False
    """gae: responses and episodes that a bound cut off go on with the critic's value of their last
    state, instead of ending with 0 (arXiv:1712.00378)."""
    loss: str = "ppo_clip"
    """A registered loss: ppo_clip, gspo and others (docs/algorithms.md), or one of `path`."""
    aggregation: str = "token_mean"
    """How losses of tokens are weighted: token_mean and others (docs/algorithms.md)."""
    clip_low: float = bounded(0.2, ge=0)
    """How far a token's ratio may fall below 1 before its gradient is cut off."""
    clip_high: float = bounded(0.28, ge=0)
    """Above clip_low as in DAPO's clip-higher; PPO and GRPO as published have 0.2."""
    dual_clip: float = bounded(0.0, gt=1, also=0)
    """ppo_clip: bound of the ratio of tokens with negative advantage, above 1; 0: none."""
    max_ratio: float = bounded(20.0, gt=0)
    """dppo_tv, dppo_kl: bound of the importance ratio."""
    tau_positive: float = bounded(1.0, gt=0)
    """sapo: temperature for tokens with positive advantage."""
    tau_negative: float = bounded(1.05, gt=0)
    """sapo: temperature for all other tokens."""
    dro_beta: float = bounded(0.05, gt=0)
    """dro: weight of the squared log ratio."""
    reward_coef: float = bounded(0.0, ge=0)
    """distillation: weight of GRPO's advantages beside the teacher's signal."""
    filter_overlong: bool = False
    """Do not train on responses that were cut off at rollout.max_response_len (DAPO)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; a negative one punishes entropy."""
    kl: KLConfig = field(default_factory=KLConfig)
    covariance: CovarianceConfig = field(default_factory=CovarianceConfig)
    vespo: VespoConfig = field(default_factory=VespoConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
