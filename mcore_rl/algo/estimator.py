"""Adds advantages, computed from a step's scores, to its batch; with a critic, also returns.

compute_from_tokens (a part of the step, where its tokens are)  ->  batch and PartSums
join_sums (all parts)  ->  compute_from_samples (no tokens), or normalize (each part again)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mcore_rl.algo.advantages import teacher_log_ratio, weights_of_groups
from mcore_rl.algo.batch_outcomes import (
    SampleShapes,
    kl_of_tokens,
    outcomes_of_scores,
    place_at_tokens,
    with_last_values,
    with_tokens,
    with_turn_rewards,
)
from mcore_rl.algo.lookup import UserFile, adopt_user_file, advantage_of, needs_of, user_file_of
from mcore_rl.algo.moments import Moments, join_moments, standardize
from mcore_rl.algo.outcomes import Outcomes
from mcore_rl.algo.registry import Sees, advantages
from mcore_rl.algo.values import estimate_gae, explained_variance
from mcore_rl.config import AlgorithmConfig, KLConfig
from mcore_rl.types import StoredSample, TrainBatch
from mcore_rl.types.scores import ENVIRONMENT, Scores

SUMMED = ("token_rewards_R", "logprobs_R", "ref_logprobs_R")
"""Fields of Outcomes whose sums by sample an advantage may see in place of tokens."""


@dataclass(frozen=True)
class PartSums:
    """Sums over the tokens of a part of a step, which make up those of the step.

    by_sample   float64 [n] by field of Outcomes, sums over the tokens of the part's n samples
    moments     of numbers by token: advantages, kl, teacher, returns, errors
    """

    by_sample: Mapping[str, Tensor] = field(default_factory=dict)
    moments: Mapping[str, Moments] = field(default_factory=dict)


NO_SUMS = PartSums()


def join_sums(
    parts: Sequence[PartSums], places: Sequence[Sequence[int]], num_samples: int
) -> PartSums:
    """Return the sums of a step; `places` are those of each part's samples in it.

    Samples of no part have no token.
    """
    by_sample: dict[str, Tensor] = {}
    for part, own in zip(parts, places, strict=True):
        for name, sums_n in part.by_sample.items():
            empty_N = torch.zeros(num_samples, dtype=torch.float64)
            by_sample.setdefault(name, empty_N)[list(own)] = sums_n
    names = {name: None for part in parts for name in part.moments}
    moments = {
        name: join_moments(part.moments[name] for part in parts if name in part.moments)
        for name in names
    }
    return PartSums(by_sample, moments)


class Advantages:
    """Computes the advantages of a run's batches and the returns that its critic learns.

    Samples of the same prompt (by Prompt.index) are one group. The state is the coefficient of a KL
    in the reward, which may be steered from step to step.
    """

    def __init__(
        self,
        config: AlgorithmConfig,
        part_weights: Mapping[str, float] | None = None,
        return_lambda: float = 1.0,
    ) -> None:
        """Take the algorithm's options, the weights of reward.parts and critic.gae_lambda.

        Raises ValueError if the advantage is unknown or needs reward parts that are not given.
        """
        self._config = config
        self._part_weights = part_weights or {}
        self._return_lambda = return_lambda
        self._function = advantage_of(config)
        self._needs = needs_of(config)
        self._kl_coef = config.kl.coef
        if self._needs.parts and not part_weights:
            raise ValueError(
                f"algorithm.advantage={config.advantage} needs rewards of several parts: set"
                " reward.parts"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the options: a user's function, from a file, has no module to be found in."""
        options = (self._config, self._part_weights, self._return_lambda)
        return _restore, (user_file_of(self._config), self._kl_coef, *options)

    @property
    def sees(self) -> Sees:
        """Return what the advantage must see at once."""
        return advantages.entry(self._config.advantage).sees

    @property
    def are_normalized(self) -> bool:
        """Return whether `normalize` comes after `compute_from_tokens`."""
        return advantages.entry(self._config.advantage).normalized

    @property
    def need_tokens(self) -> bool:
        """Return whether `compute_from_tokens` tells more than rewards, groups and lengths do."""
        own = advantages.needs(self._config.advantage)
        return (
            self.sees != "samples"
            or self._has_kl_in_reward
            or own.old_logprobs
            or own.reference
            or self._needs.critic
            or self._needs.teacher
        )

    def compute_from_tokens(
        self, batch: TrainBatch, shapes: SampleShapes, scores: Scores
    ) -> tuple[TrainBatch, PartSums]:
        """Return the batch with what its own tokens tell of advantages and returns, and its sums.

        The batch has all samples of some prompts, or of the step if `sees` says so. Advantages
        that are normalized are float64 yet; advantages that see samples are left to
        `compute_from_samples`.
        """
        outcomes = outcomes_of_scores(scores, shapes, self._config, self._part_weights)
        outcomes = with_tokens(outcomes, batch, self._config)
        moments: dict[str, Moments] = {}
        if self._has_kl_in_reward:
            kl_R = kl_of_tokens(batch, self._config)
            moments["kl"] = Moments.from_values(kl_R)
            outcomes = replace(outcomes, token_rewards_R=-self._kl_coef * kl_R)
        if outcomes.teacher_logprobs_R is not None:
            moments["teacher"] = Moments.from_values(teacher_log_ratio(outcomes))
        by_sample = sum_by_sample(outcomes) if self._reads_sums else {}
        unnamed = 0.0 if self._part_weights else 1.0  # parts that have no weight count nothing
        outcomes = with_turn_rewards(outcomes, batch, self._part_weights.get(ENVIRONMENT, unnamed))
        if self._config.bootstrap_truncated:
            outcomes = with_last_values(outcomes, batch, shapes)
        if self.sees != "samples":
            batch, moments["advantages"] = self._with_advantages(batch, outcomes)
        if outcomes.values_R is not None:
            batch, of_returns = self._with_returns(batch, outcomes, outcomes.values_R)
            moments |= of_returns
        return batch, PartSums(by_sample, moments)

    def normalize(self, batch: TrainBatch, sums: PartSums) -> tuple[TrainBatch, PartSums]:
        """Normalize the advantages of a part by those of the step; its own sums are none."""
        assert batch.advantages_T is not None, "compute_from_tokens comes first"
        normal_T = standardize(batch.advantages_T, sums.moments["advantages"]).float()
        normal_T = normal_T.masked_fill_(~batch.loss_mask_T, 0.0)
        return replace(batch, advantages_T=normal_T), PartSums()

    def compute_from_samples(
        self, scores: Scores, samples: Sequence[StoredSample], sums: PartSums = NO_SUMS
    ) -> Tensor:
        """Return float32 [N], the advantage of each sample at all of its tokens."""
        advantages_N = self._function(self._without_tokens(scores, samples, sums), self._config)
        if advantages_N.shape != (len(samples),):
            raise ValueError(
                f"algorithm.advantage={self._config.advantage} returned shape"
                f" {tuple(advantages_N.shape)} for {len(samples)} samples: registered with"
                " sees='samples', it must return Outcomes.spread(...) of a number per sample"
            )
        return advantages_N.float()

    def summarize(
        self, scores: Scores, samples: Sequence[StoredSample], sums: PartSums
    ) -> dict[str, float]:
        """Return the metrics of a step from the sums of its tokens."""
        metrics: dict[str, float] = {}
        moments = sums.moments
        if "kl" in moments:
            metrics |= {"kl/reward": moments["kl"].mean, "kl/coef": self._kl_coef}
        if "teacher" in moments:
            metrics["kl/teacher"] = -moments["teacher"].mean
        if "returns" in moments:
            explained = explained_variance(moments["errors"], moments["returns"])
            metrics["critic/explained_variance"] = explained
        if self._needs.pairs:
            outcomes = self._without_tokens(scores, samples, sums)
            metrics |= weights_of_groups(outcomes, self._config.preference)[1]
        return metrics

    def steer(self, metrics: Mapping[str, float], num_samples: int) -> None:
        """Adapt the coefficient of a KL in the reward to the KL of a step."""
        if "kl/reward" in metrics:
            kl = metrics["kl/reward"]
            self._kl_coef = steer_coefficient(self._kl_coef, kl, num_samples, self._config.kl)

    def state_dict(self) -> dict[str, float]:
        return {"kl_coef": self._kl_coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._kl_coef = state["kl_coef"]

    @property
    def _has_kl_in_reward(self) -> bool:
        return self._config.kl.in_reward and self._config.kl.coef != 0

    @property
    def _reads_sums(self) -> bool:
        return self.sees == "samples" or self._needs.pairs

    def _without_tokens(
        self, scores: Scores, samples: Sequence[StoredSample], sums: PartSums
    ) -> Outcomes:
        shapes = SampleShapes.from_samples(samples)
        outcomes = outcomes_of_scores(scores, shapes, self._config, self._part_weights)
        return replace(outcomes, by_sample=True, sums=sums.by_sample)

    def _with_advantages(self, batch: TrainBatch, outcomes: Outcomes) -> tuple[TrainBatch, Moments]:
        """Return the batch with the function's advantages, and their moments if they matter."""
        advantages_R = self._function(outcomes, self._config)
        advantages_R = advantages_R.double() if self.are_normalized else advantages_R.float()
        batch = replace(batch, advantages_T=place_at_tokens(batch, advantages_R, self._config))
        return batch, Moments.from_values(advantages_R) if self.are_normalized else Moments()

    def _with_returns(
        self, batch: TrainBatch, outcomes: Outcomes, values_R: Tensor
    ) -> tuple[TrainBatch, dict[str, Moments]]:
        """Return the batch with returns, and the moments of the critic's errors and of returns."""
        errors_R = estimate_gae(outcomes, self._config.gamma, self._return_lambda)
        moments = {"errors": Moments.from_values(errors_R)}
        returns_R = errors_R.add_(values_R)
        moments["returns"] = Moments.from_values(returns_R)
        returns_T = place_at_tokens(batch, returns_R.float(), self._config)
        return replace(batch, returns_T=returns_T), moments


def sum_by_sample(outcomes: Outcomes) -> dict[str, Tensor]:
    """Return the sums by sample of those fields of SUMMED that are there, float64 [N] by name."""
    sums = {name: outcomes.sum_of(name) for name in SUMMED}
    return {name: sums_N for name, sums_N in sums.items() if sums_N is not None}


def _restore(
    user_file: UserFile | None,
    coef: float,
    config: AlgorithmConfig,
    part_weights: Mapping[str, float],
    return_lambda: float,
) -> Advantages:
    if user_file is not None:
        adopt_user_file(user_file)
    restored = Advantages(config, part_weights, return_lambda)
    restored.load_state_dict({"kl_coef": coef})
    return restored


def steer_coefficient(coef: float, kl: float, num_samples: int, config: KLConfig) -> float:
    """Return the coefficient after a step of `num_samples` with this KL; arXiv:1909.08593, section
    2.2.
    """
    if not config.target:
        return coef
    error = min(max(kl / config.target - 1, -0.2), 0.2)
    return coef * (1 + error * num_samples / config.horizon)
