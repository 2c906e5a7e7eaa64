"""Recipe options in, the functions of a run out: advantages from rewards, token losses from log-probs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from mcore_rl.algo.advantages import ADVANTAGES, teacher_log_ratio, weights_of_groups
from mcore_rl.algo.aggregation import AGGREGATIONS
from mcore_rl.algo.correction import correction_weights
from mcore_rl.algo.diagnostics import log_ratio, logprob_diff, policy_drift
from mcore_rl.algo.kl import KL_ESTIMATORS
from mcore_rl.algo.losses import LOSSES, LossTokens, Metrics
from mcore_rl.algo.outcomes import Outcomes
from mcore_rl.algo.preferences import PAIR_LOSSES
from mcore_rl.algo.sequences import SequenceSum, sequence_sum
from mcore_rl.algo.values import explained_variance, generalised, value_loss
from mcore_rl.config import AlgorithmConfig, CriticConfig, KLConfig
from mcore_rl.types import Sample, Scores, TrainBatch


class TokenLoss(Protocol):
    def __call__(
        self,
        logprobs_T: Tensor,
        entropy_T: Tensor,
        batch: TrainBatch,
        sums: SequenceSum | None = None,
        /,
    ) -> tuple[Tensor, Metrics]:
        """(loss_T, metrics_T). `sums` is needed where the batch's sequences lie on several ranks.

        loss_T is not weighted: the loss of the step is sum(batch.loss_weights_T * loss_T). metrics_T are
        detached token values that the caller averages over the loss mask of the step; those named *_max it
        maximises instead.
        """
        ...


class ValueLoss(Protocol):
    def __call__(self, values_T: Tensor, batch: TrainBatch, /) -> tuple[Tensor, Metrics]:
        """(loss_T, metrics_T), as a TokenLoss."""
        ...


class Advantages:
    """Advantages of a run's batches and what a critic learns; the coefficient of a KL in the reward where
    that is steered.

    Samples of the same prompt (by Prompt.index) are one group.
    """

    def __init__(
        self,
        config: AlgorithmConfig,
        part_weights: Mapping[str, float] | None = None,
        return_lambda: float = 1.0,
    ) -> None:
        """`part_weights`: the recipe's reward.parts; `return_lambda`: critic.gae_lambda."""
        self._config, self._part_weights, self._return_lambda = (
            config,
            part_weights or {},
            return_lambda,
        )
        self._function = ADVANTAGES[config.advantage]
        self._kl_coef = config.kl.coef
        if config.advantage == "gdpo" and not part_weights:
            raise ValueError(
                "algorithm.advantage=gdpo needs rewards of several parts: set reward.parts"
            )

    def __call__(
        self, scores: Scores, samples: Sequence[Sample], batch: TrainBatch
    ) -> tuple[TrainBatch, dict[str, float]]:
        """(the batch made of `samples` with advantages_T and, where it has values, returns_T; metrics).

        Both are 0 off its loss mask.
        """
        kl_R, metrics = None, {}
        if self._config.kl.in_reward and self._config.kl.coef:
            kl_R = kl_of_tokens(batch, self._config)
            metrics = {"kl/reward": float(kl_R.mean()), "kl/coef": self._kl_coef}
        parts = [
            (weight, torch.tensor(scores.parts[name]))
            for name, weight in self._part_weights.items()
        ]
        outcomes = Outcomes(
            rewards_N=torch.tensor(scores.rewards_N, dtype=torch.float64),
            group_N=torch.tensor([sample.prompt.index for sample in samples], dtype=torch.int64),
            lens_N=torch.tensor(
                [len(sample.response_ids) for sample in samples], dtype=torch.int64
            ),
            token_rewards_R=None if kl_R is None else -self._kl_coef * kl_R,
            parts=parts,
            energy_R=_energy(batch),
            greedy_N=torch.tensor(scores.greedy_N, dtype=torch.float64)
            if scores.greedy_N
            else None,
            logprobs_R=_trained(batch, old_policy(batch, self._config)),
            ref_logprobs_R=_trained(batch, batch.ref_logprobs_T),
            teacher_logprobs_R=torch.tensor([v for row in scores.teacher_N for v in row])
            if scores.teacher_N
            else None,
            values_R=None if batch.values_T is None else batch.values_T[batch.loss_mask_T],
        )
        if self._config.advantage == "dpo":
            metrics |= weights_of_groups(outcomes, self._config.preference)[1]
        if scores.teacher_N:
            metrics["kl/teacher"] = -float(teacher_log_ratio(outcomes).mean())
        if kl_R is not None:
            self._kl_coef = steered(
                self._kl_coef, float(kl_R.mean()), len(samples), self._config.kl
            )
        advantages_T = _at_tokens(batch, self._function(outcomes, self._config))
        batch = replace(batch, advantages_T=advantages_T)
        if outcomes.values_R is not None:
            returns_R = (
                generalised(outcomes, self._config.gamma, self._return_lambda) + outcomes.values_R
            )
            batch = replace(batch, returns_T=_at_tokens(batch, returns_R.float()))
            metrics["critic/explained_variance"] = explained_variance(outcomes.values_R, returns_R)
        return batch, metrics

    def state_dict(self) -> dict[str, float]:
        return {"kl_coef": self._kl_coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._kl_coef = state["kl_coef"]


def _at_tokens(batch: TrainBatch, values_R: Tensor) -> Tensor:
    mask_T = batch.loss_mask_T
    return torch.zeros(len(mask_T)).masked_scatter_(mask_T, values_R)


def steered(coef: float, kl: float, num_samples: int, config: KLConfig) -> float:
    """The coefficient after a step of `num_samples` whose KL was `kl`; arXiv:1909.08593, section 2.2."""
    if not config.target:
        return coef
    error = min(max(kl / config.target - 1, -0.2), 0.2)
    return coef * (1 + error * num_samples / config.horizon)


def _trained(batch: TrainBatch, values_T: Tensor | None) -> Tensor | None:
    return None if values_T is None else values_T[batch.loss_mask_T]


def _energy(batch: TrainBatch) -> Tensor | None:
    """1 - 2 p + sum(p^2) of each trained token, where the sums are known."""
    if batch.sum_squares_T is None or batch.old_logprobs_T is None:
        return None
    energy_T = 1 - 2 * batch.old_logprobs_T.double().exp() + batch.sum_squares_T.double()
    return energy_T[batch.loss_mask_T]


def kl_of_tokens(batch: TrainBatch, config: AlgorithmConfig) -> Tensor:
    """float64, KL(old || reference) of each trained token; what InstructGPT, arXiv:2203.02155, eq. 2,
    takes from its reward.
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


def old_policy(batch: TrainBatch, config: AlgorithmConfig) -> Tensor | None:
    """Log-probs of the policy that the ratio loss starts from; None: those of the one that is trained."""
    return batch.rollout_logprobs_T if config.correction.bypass else batch.old_logprobs_T


def make_policy_loss(config: AlgorithmConfig) -> TokenLoss:
    """The loss of `config`, picklable. Raises ValueError naming the option that no function answers to."""
    LOSSES[config.loss](config)
    _ = PAIR_LOSSES[config.preference.loss]
    _ = KL_ESTIMATORS[config.kl.estimator], AGGREGATIONS[config.aggregation]
    return partial(policy_loss, config=config)


def make_value_loss(config: CriticConfig) -> ValueLoss:
    """The critic's loss, picklable."""
    return partial(value_loss, clip=config.value_clip)


def policy_loss(
    logprobs_T: Tensor,
    entropy_T: Tensor,
    batch: TrainBatch,
    sums: SequenceSum | None = None,
    *,
    config: AlgorithmConfig,
) -> tuple[Tensor, Metrics]:
    """Policy loss + kl.coef * KL(policy || reference) - entropy_coef * entropy, per token.

    Without log-probs of an old policy the batch is on policy: the log-probs themselves, detached, are the old
    ones. Nothing off the loss mask reaches loss, gradient or metrics.
    """
    if batch.advantages_T is None:
        raise ValueError("policy_loss needs batch.advantages_T")
    mask_T = batch.loss_mask_T
    sums = sums or sequence_sum(batch.lens_N, mask_T.device)
    own_logprobs_T = logprobs_T.detach() if batch.old_logprobs_T is None else batch.old_logprobs_T
    old_logprobs_T = old_policy(batch, config)
    if old_logprobs_T is None:
        old_logprobs_T = logprobs_T.detach()
    num_tokens_T = sums(mask_T.to(logprobs_T.dtype)).clamp(min=1)
    tokens = LossTokens(
        logprobs_T=torch.where(mask_T, logprobs_T, 0.0),
        log_ratio_T=log_ratio(logprobs_T, old_logprobs_T, mask_T),
        advantages_T=batch.advantages_T.masked_fill(~mask_T, 0.0),
        sequence_mean=lambda values_T: sums(values_T.masked_fill(~mask_T, 0.0)) / num_tokens_T,
        held_back_T=batch.held_back_T,
    )
    entropy_T = torch.where(mask_T, entropy_T, 0.0)
    loss_T, metrics = LOSSES[config.loss](config)(tokens)
    metrics |= {"loss/policy": loss_T.detach(), "loss/entropy": entropy_T.detach()}
    metrics |= policy_drift(tokens.log_ratio_T)
    if batch.rollout_logprobs_T is not None:
        clip = {"clip_low": config.clip_low, "clip_high": config.clip_high}
        metrics |= logprob_diff(own_logprobs_T, batch.rollout_logprobs_T, mask_T, **clip)
    if (config.correction.weight, config.correction.reject) != ("none", "none"):
        if batch.rollout_logprobs_T is None:
            raise ValueError("algorithm.correction needs batch.rollout_logprobs_T")
        log_ratio_T = log_ratio(own_logprobs_T, batch.rollout_logprobs_T, mask_T)
        weights_T, corrected = correction_weights(
            log_ratio_T, num_tokens_T, tokens.sequence_mean, config.correction
        )
        loss_T, metrics = loss_T * weights_T, metrics | corrected
    loss_T = loss_T + _kl_loss(logprobs_T, batch, config, metrics)
    if config.entropy_coef:
        loss_T = loss_T - config.entropy_coef * entropy_T
    return loss_T, metrics


def _kl_loss(
    logprobs_T: Tensor, batch: TrainBatch, config: AlgorithmConfig, metrics: Metrics
) -> Tensor | float:
    """kl.coef * KL(policy || reference), noted in `metrics`; 0 where it is part of the reward."""
    if batch.ref_logprobs_T is None:
        if config.kl.coef:
            raise ValueError(f"algorithm.kl.coef={config.kl.coef} needs batch.ref_logprobs_T")
        return 0.0
    estimate = KL_ESTIMATORS[config.kl.estimator]
    kl_T = estimate(log_ratio(logprobs_T, batch.ref_logprobs_T, batch.loss_mask_T))
    metrics["kl/ref"] = kl_T.detach()
    return 0.0 if config.kl.in_reward else config.kl.coef * kl_T


def sft_loss(
    logprobs_T: Tensor, entropy_T: Tensor, batch: TrainBatch, sums: SequenceSum | None = None
) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood of the tokens on the loss mask."""
    loss_T = -torch.where(batch.loss_mask_T, logprobs_T, 0.0)
    entropy_T = torch.where(batch.loss_mask_T, entropy_T, 0.0).detach()
    return loss_T, {"loss/nll": loss_T.detach(), "loss/entropy": entropy_T}
