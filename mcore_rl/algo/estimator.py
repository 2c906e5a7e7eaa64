"""Adds advantages, computed from a step's scores, to its batch; with a critic, also returns."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mcore_rl.algo.advantages import teacher_log_ratio, weights_of_groups
from mcore_rl.algo.choice import advantage_of, needs_of
from mcore_rl.algo.correction import old_policy
from mcore_rl.algo.diagnostics import log_ratio
from mcore_rl.algo.kl import KL_ESTIMATORS
from mcore_rl.algo.outcomes import Outcomes
from mcore_rl.algo.values import explained_variance, generalized
from mcore_rl.config import AlgorithmConfig, KLConfig
from mcore_rl.types import Sample, Scores, TrainBatch


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

    def __call__(
        self, scores: Scores, samples: Sequence[Sample], batch: TrainBatch
    ) -> tuple[TrainBatch, dict[str, float]]:
        """Return (the batch with advantages_T and, if it has values, returns_T; metrics).

        `batch` was made of `samples`, in their order. Advantages and returns are 0 off its loss
        mask.
        """
        kl_R = None
        metrics: dict[str, float] = {}
        if self._config.kl.in_reward and self._config.kl.coef:
            kl_R = kl_of_tokens(batch, self._config)
            metrics = {"kl/reward": float(kl_R.mean()), "kl/coef": self._kl_coef}
        outcomes = self._outcomes(scores, samples, batch, kl_R)
        if self._needs.pairs:
            _, pair_metrics = weights_of_groups(outcomes, self._config.preference)
            metrics |= pair_metrics
        if outcomes.teacher_logprobs_R is not None:
            metrics["kl/teacher"] = -float(teacher_log_ratio(outcomes).mean())
        if kl_R is not None:
            kl = float(kl_R.mean())
            self._kl_coef = steered(self._kl_coef, kl, len(samples), self._config.kl)
        advantages_R = self._function(outcomes, self._config)
        batch = replace(batch, advantages_T=self._at_tokens(batch, advantages_R))
        if outcomes.values_R is not None:
            estimate_R = generalized(outcomes, self._config.gamma, self._return_lambda)
            returns_R = estimate_R + outcomes.values_R
            batch = replace(batch, returns_T=self._at_tokens(batch, returns_R.float()))
            metrics["critic/explained_variance"] = explained_variance(outcomes.values_R, returns_R)
        return batch, metrics

    def state_dict(self) -> dict[str, float]:
        return {"kl_coef": self._kl_coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._kl_coef = state["kl_coef"]

    def _outcomes(
        self, scores: Scores, samples: Sequence[Sample], batch: TrainBatch, kl_R: Tensor | None
    ) -> Outcomes:
        """Gather rewards and log-probs; `kl_R` times its coefficient is subtracted from rewards."""
        parts = [
            (weight, torch.tensor(scores.parts[name]))
            for name, weight in self._part_weights.items()
        ]
        greedy_N = torch.tensor(scores.greedy_N, dtype=torch.float64) if scores.greedy_N else None
        teacher_R = None
        if scores.teacher_N:
            teacher_R = torch.tensor([value for row in scores.teacher_N for value in row])
        return Outcomes(
            rewards_N=torch.tensor(scores.rewards_N, dtype=torch.float64),
            group_N=torch.tensor([sample.prompt.index for sample in samples], dtype=torch.int64),
            lens_N=torch.tensor(
                [len(sample.response_ids) for sample in samples], dtype=torch.int64
            ),
            token_rewards_R=None if kl_R is None else -self._kl_coef * kl_R,
            parts=parts,
            energy_R=_energy(batch),
            greedy_N=greedy_N,
            logprobs_R=_trained(batch, old_policy(batch, self._config)),
            ref_logprobs_R=_trained(batch, batch.ref_logprobs_T),
            teacher_logprobs_R=teacher_R,
            values_R=_trained(batch, batch.values_T),
        )

    def _at_tokens(self, batch: TrainBatch, values_R: Tensor) -> Tensor:
        """Spread values_R over the batch's tokens. Raises ValueError if they are not one per
        trained token.

        A user's advantage may return another shape or dtype.
        """
        mask_T = batch.loss_mask_T
        num_trained = int(mask_T.sum())
        if values_R.shape != (num_trained,):
            raise ValueError(
                f"algorithm.advantage={self._config.advantage} returned shape"
                f" {tuple(values_R.shape)}"
                f" for {num_trained} response tokens: expected one number per token"
            )
        return torch.zeros(len(mask_T)).masked_scatter_(mask_T, values_R.float())


def steered(coef: float, kl: float, num_samples: int, config: KLConfig) -> float:
    """Return the coefficient after a step of `num_samples` with this KL; arXiv:1909.08593, section
    2.2.
    """
    if not config.target:
        return coef
    error = min(max(kl / config.target - 1, -0.2), 0.2)
    return coef * (1 + error * num_samples / config.horizon)


def kl_of_tokens(batch: TrainBatch, config: AlgorithmConfig) -> Tensor:
    """Return KL(old || reference) of each trained token, float64 [R].

    InstructGPT, arXiv:2203.02155, eq. 2, subtracts it from the reward. Raises ValueError without
    log-probs of both policies.
    """
    old_logprobs_T = old_policy(batch, config)
    if old_logprobs_T is None or batch.ref_logprobs_T is None:
        raise ValueError(
            "algorithm.kl.in_reward needs log-probs of the old policy and of the reference"
        )
    log_ratio_T = log_ratio(
        old_logprobs_T.double(), batch.ref_logprobs_T.double(), batch.loss_mask_T
    )
    return KL_ESTIMATORS[config.kl.estimator](log_ratio_T)[batch.loss_mask_T]


def _trained(batch: TrainBatch, values_T: Tensor | None) -> Tensor | None:
    return None if values_T is None else values_T[batch.loss_mask_T]


def _energy(batch: TrainBatch) -> Tensor | None:
    """Return 1 - 2 p + sum(p^2) of each trained token; None if the sums are unknown."""
    if batch.sum_squares_T is None or batch.old_logprobs_T is None:
        return None
    energy_T = 1 - 2 * batch.old_logprobs_T.double().exp() + batch.sum_squares_T.double()
    return energy_T[batch.loss_mask_T]
