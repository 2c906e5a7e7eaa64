"""Options of the algorithm: advantages, loss, KL, correction (docs/algorithms.md)."""

from dataclasses import dataclass, field

from mcore_rl.config.checks import one_of, positive


@dataclass
class KLConfig:
    coef: float = 0.0
    estimator: str = "k3"
    in_reward: bool = False
    """Take coef * KL of the old policy from the reward of each token, instead of adding it to the loss."""
    target: float = 0.0
    """in_reward: KL per token, in nats, that the coefficient is steered to from `coef` on; 0 keeps it."""
    horizon: int = 10000
    """target: samples over which the coefficient may grow or shrink by a fifth."""

    def __post_init__(self) -> None:
        known = ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+")
        one_of("algorithm.kl.estimator", self.estimator, known)
        positive("algorithm.kl.horizon", self.horizon)
        if self.target and not (self.in_reward and self.coef > 0):
            raise ValueError(
                f"algorithm.kl.target={self.target} with in_reward={self.in_reward} and coef={self.coef}:"
                " only a coefficient above 0 of a KL in the reward is steered"
            )


@dataclass
class CorrectionConfig:
    """Importance weights for samples that the engine drew from other probabilities than the trainer has."""

    weight: str = "none"
    """Weigh each token's loss by the ratio trainer / engine of the token, or of its sequence: sequence for
    the product over its tokens, geometric for their geometric mean."""
    bound: str = "truncate"
    """truncate: weights above `high` are made `high`; mask: those outside `low` to `high` are made 0."""
    low: float = 0.0
    high: float = 2.0
    reject: str = "none"
    """Leave out tokens, or whole sequences (mean over tokens), whose KL of engine to trainer is too large."""
    reject_above: float = 0.0
    """In nats, by the estimator k3."""
    bypass: bool = False
    """Take the engine's log-probs as the old policy's: no pass to compute those, one ratio for both."""

    def __post_init__(self) -> None:
        one_of(
            "algorithm.correction.weight", self.weight, ("none", "token", "sequence", "geometric")
        )
        one_of("algorithm.correction.bound", self.bound, ("truncate", "mask"))
        one_of("algorithm.correction.reject", self.reject, ("none", "token", "sequence"))
        if not 0 <= self.low <= 1 <= self.high:
            raise ValueError(
                f"algorithm.correction.low={self.low} and high={self.high}: a weight of 1 must lie between"
            )
        if self.reject != "none":
            positive("algorithm.correction.reject_above", self.reject_above)
        if self.bypass and (self.weight != "none" or self.reject != "none"):
            raise ValueError(
                f"algorithm.correction.bypass=true with weight={self.weight} and reject={self.reject}: there"
                " is no third policy between engine and trainer; set both to none"
            )

    @property
    def is_on(self) -> bool:
        """Whether the loss knows the engine's probabilities at all."""
        return self.weight != "none" or self.bypass


@dataclass
class CovarianceConfig:
    """For algorithm.loss=clip_cov and kl_cov: which tokens' advantage and log-prob vary together too much."""

    share: float = 0.0002
    """Of the mini-batch's tokens, how many are held back."""
    low: float = 1.0
    """clip_cov takes them among those whose covariance lies between `low` and `high`, ..."""
    high: float = 5.0
    kl_coef: float = 1.0
    """kl_cov among the largest, and adds this times |log ratio| to their loss."""

    def __post_init__(self) -> None:
        positive("algorithm.covariance.share", self.share)


@dataclass
class PreferenceConfig:
    """The loss of pairs of responses, of `mcore-rl dpo` and algorithm.advantage=dpo (algo/preferences.py)."""

    loss: str = "dpo"
    beta: float = 0.1
    label_smoothing: float = 0.0
    """dpo, simpo: share of the pairs that are believed to be the wrong way round."""
    target_margin: float = 0.0
    """simpo: how much more implicit reward the chosen response shall have."""
    nll_coef: float = 0.0
    """Weight of the chosen responses' own negative log-likelihood, mean over tokens."""

    def __post_init__(self) -> None:
        positive("algorithm.preference.beta", self.beta)
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"algorithm.preference.label_smoothing={self.label_smoothing}: must lie in [0, 0.5)"
            )
        for name, losses in (("label_smoothing", ("dpo", "simpo")), ("target_margin", ("simpo",))):
            if (value := getattr(self, name)) and self.loss not in losses:
                raise ValueError(
                    f"algorithm.preference.{name}={value} with algorithm.preference.loss={self.loss}: only"
                    f" {' and '.join(losses)} read it; set it to 0"
                )

    @property
    def needs_reference(self) -> bool:
        return self.loss != "simpo"


@dataclass
class AlgorithmConfig:
    path: str = ""
    """Python file that registers advantages and losses of your own (docs/algorithms.md); a relative path is
    looked up from the working directory, then beside recipes/."""
    advantage: str = "grpo"
    gamma: float = 1.0
    """Discount of later rewards, where advantages are computed token by token."""
    gae_lambda: float = 1.0
    """gae: 1 takes the whole future from rewards, 0 all but the next token's from the critic."""
    loss: str = "ppo_clip"
    aggregation: str = "token_mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    """ppo_clip: bound of the ratio of tokens with negative advantage, above 1; 0: none."""
    max_ratio: float = 20.0
    """dppo_tv, dppo_kl: bound of the importance ratio."""
    tau_positive: float = 1.0
    """sapo: temperature of tokens with positive advantage."""
    tau_negative: float = 1.05
    """sapo: of the others."""
    reward_coef: float = 0.0
    """distillation: weight of GRPO's advantages beside what the teacher says."""
    filter_overlong: bool = False
    """Do not train on responses that were cut off at rollout.max_response_len (DAPO)."""
    entropy_coef: float = 0.0
    kl: KLConfig = field(default_factory=KLConfig)
    covariance: CovarianceConfig = field(default_factory=CovarianceConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)

    def __post_init__(self) -> None:
        for name in ("max_ratio", "tau_positive", "tau_negative"):
            positive(f"algorithm.{name}", getattr(self, name))
        if self.dual_clip and self.dual_clip <= 1:
            raise ValueError(
                f"algorithm.dual_clip={self.dual_clip}: must be above 1, or 0 for none"
            )
        if self.dual_clip and self.loss != "ppo_clip":
            raise ValueError(
                f"algorithm.dual_clip={self.dual_clip}: algorithm.loss={self.loss} has none"
            )
        if not 0 <= self.gae_lambda <= 1:
            raise ValueError(f"algorithm.gae_lambda={self.gae_lambda}: must lie in [0, 1]")
        if not 0 < self.gamma <= 1:
            raise ValueError(f"algorithm.gamma={self.gamma}: must lie in (0, 1]")
