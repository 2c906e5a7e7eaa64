"""Adds advantages, computed from a step's scores, to its batch; with a critic, also returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mcore_rl.algo.advantages import teacher_log_ratio, weights_of_groups
from mcore_rl.algo.choice import adopt_user_file, advantage_of, needs_of, user_file_of
from mcore_rl.algo.correction import old_policy
from mcore_rl.algo.diagnostics import log_ratio
from mcore_rl.algo.kl import KL_ESTIMATORS
from mcore_rl.algo.outcomes import Outcomes
from mcore_rl.algo.registry import advantages
from mcore_rl.algo.sequences import trained_in_order
from mcore_rl.algo.user_file import UserFile
from mcore_rl.algo.values import explained_variance, generalized
from mcore_rl.config import AlgorithmConfig, KLConfig
from mcore_rl.scores import ENVIRONMENT, Scores
from mcore_rl.types import CUT_OFF, AnySample, TrainBatch


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
        return _restored, (user_file_of(self._config), self._kl_coef, *options)

    def __call__(
        self, scores: Scores, samples: Sequence[AnySample], batch: TrainBatch
    ) -> tuple[TrainBatch, dict[str, float]]:
        """Return (the batch with advantages_T and, if it has values, returns_T; metrics).

        `batch` was made of `samples`, in their order. Advantages and returns are 0 off its loss
        mask.
        """
        batch, metrics = self.estimate(batch, SampleShapes.of(samples), scores)
        self.steer(metrics, len(samples))
        return batch, metrics

    @property
    def are_by_sample(self) -> bool:
        """Return whether rewards, groups and lengths suffice; see `of_samples`."""
        config = self._config
        has_token_rewards = config.kl.in_reward and bool(config.kl.coef)
        needs_tokens = has_token_rewards or self._needs.critic or self._needs.teacher
        return advantages.is_by_sample(config.advantage) and not needs_tokens

    def of_samples(self, scores: Scores, samples: Sequence[AnySample]) -> Tensor:
        """Return float32 [N], the advantage of each sample at all of its tokens."""
        outcomes = Outcomes(**self._of_rewards(scores, SampleShapes.of(samples)), by_sample=True)
        advantages_N = self._function(outcomes, self._config)
        if advantages_N.shape != (len(samples),):
            raise ValueError(
                f"algorithm.advantage={self._config.advantage} returned shape"
                f" {tuple(advantages_N.shape)} for {len(samples)} samples: registered with"
                " by_sample=True, it must return Outcomes.spread(...) of a number per sample"
            )
        return advantages_N.float()

    def estimate(
        self, batch: TrainBatch, shapes: "SampleShapes", scores: Scores
    ) -> tuple[TrainBatch, dict[str, float]]:
        """Do as `__call__` without a change of state: `steer` comes after it."""
        kl_R = None
        metrics: dict[str, float] = {}
        if self._config.kl.in_reward and self._config.kl.coef:
            kl_R = kl_of_tokens(batch, self._config)
            metrics = {"kl/reward": float(kl_R.mean()), "kl/coef": self._kl_coef}
        outcomes = self._outcomes(scores, shapes, batch, kl_R)
        if self._needs.pairs:
            _, pair_metrics = weights_of_groups(outcomes, self._config.preference)
            metrics |= pair_metrics
        if outcomes.teacher_logprobs_R is not None:
            metrics["kl/teacher"] = -float(teacher_log_ratio(outcomes).mean())
        advantages_R = self._function(outcomes, self._config)
        batch = replace(batch, advantages_T=self._at_tokens(batch, advantages_R))
        if outcomes.values_R is not None:
            estimate_R = generalized(outcomes, self._config.gamma, self._return_lambda)
            returns_R = estimate_R + outcomes.values_R
            batch = replace(batch, returns_T=self._at_tokens(batch, returns_R.float()))
            metrics["critic/explained_variance"] = explained_variance(outcomes.values_R, returns_R)
        return batch, metrics

    def steer(self, metrics: Mapping[str, float], num_samples: int) -> None:
        """Adapt the coefficient of a KL in the reward to the KL of a step."""
        if "kl/reward" in metrics:
            kl = metrics["kl/reward"]
            self._kl_coef = steered(self._kl_coef, kl, num_samples, self._config.kl)

    def state_dict(self) -> dict[str, float]:
        return {"kl_coef": self._kl_coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._kl_coef = state["kl_coef"]

    def _outcomes(
        self, scores: Scores, shapes: "SampleShapes", batch: TrainBatch, kl_R: Tensor | None
    ) -> Outcomes:
        """Gather rewards and log-probs; `kl_R` times its coefficient is subtracted from rewards.

        Rewards of an episode's turns come with the last tokens of the turns, and the rest of the
        episode's reward with its last token.
        """
        rewards = self._of_rewards(scores, shapes)
        token_rewards_R = None if kl_R is None else -self._kl_coef * kl_R
        turn_rewards_R = _trained(batch, batch.turn_rewards_T)
        if turn_rewards_R is not None:
            turn_rewards_R = self._part_weights.get(ENVIRONMENT, 1.0) * turn_rewards_R.double()
            of_turns_N = torch.segment_reduce(turn_rewards_R, "sum", lengths=shapes.lens_N)
            rewards["rewards_N"] = rewards["rewards_N"] - of_turns_N
            token_rewards_R = turn_rewards_R + (0.0 if token_rewards_R is None else token_rewards_R)
        teacher_T = batch.teacher_logprobs_T
        if scores.teacher_N:
            mask_T = batch.loss_mask_T
            teacher_R = torch.tensor([value for row in scores.teacher_N for value in row])
            teacher_T = torch.zeros(len(mask_T)).masked_scatter_(mask_T, teacher_R)
        return Outcomes(
            **rewards,
            token_rewards_R=token_rewards_R,
            energy_R=_energy(batch),
            logprobs_R=_trained(batch, old_policy(batch, self._config)),
            ref_logprobs_R=_trained(batch, batch.ref_logprobs_T),
            teacher_logprobs_R=_trained(batch, teacher_T),
            values_R=_trained(batch, batch.values_T),
            last_values_N=self._last_values(shapes, batch),
        )

    def _last_values(self, shapes: "SampleShapes", batch: TrainBatch) -> Tensor | None:
        """Return Outcomes.last_values_N; None unless cut-off samples are bootstrapped."""
        if not self._config.bootstrap_truncated or batch.values_T is None:
            return None
        rows = range(len(batch.lens_N))
        last_rows = dict(zip(batch.sample_N or rows, rows, strict=True))
        first_T = torch.tensor((0, *batch.lens_N)).cumsum(0)[list(last_rows.values())]
        # Samples without a token have no row; `last_rows` counts the others.
        with_rows = shapes.lens_N.nonzero()[:, 0][list(last_rows)]
        last_values_N = torch.zeros(len(shapes.lens_N))
        last_values_N[with_rows] = batch.values_T[first_T]
        return last_values_N * shapes.is_cut_off_N

    def _of_rewards(self, scores: Scores, shapes: "SampleShapes") -> dict[str, Any]:
        """Return the fields of Outcomes that need no token."""
        parts = [
            (weight, torch.tensor(scores.parts[name]))
            for name, weight in self._part_weights.items()
        ]
        return {
            "rewards_N": torch.tensor(scores.rewards_N, dtype=torch.float64),
            "group_N": groups_by_role(shapes.group_N, scores, self._config.role_part),
            "lens_N": shapes.lens_N,
            "parts": parts,
            "greedy_N": torch.tensor(scores.greedy_N, dtype=torch.float64)
            if scores.greedy_N
            else None,
        }

    def _at_tokens(self, batch: TrainBatch, values_R: Tensor) -> Tensor:
        """Spread values_R over the batch's tokens. Raises ValueError if they are not one per
        trained token.

        A user's advantage may return another shape or dtype.
        """
        trained_R = trained_in_order(batch)
        num_trained = len(trained_R)
        if values_R.shape != (num_trained,):
            raise ValueError(
                f"algorithm.advantage={self._config.advantage} returned shape"
                f" {tuple(values_R.shape)}"
                f" for {num_trained} response tokens: expected one number per token"
            )
        return torch.zeros(len(batch.loss_mask_T)).index_copy_(0, trained_R, values_R.float())


def groups_by_role(group_N: Tensor, scores: Scores, part: str) -> Tensor:
    """Return int64 [N], equal for samples of one group that have the same number `part`.

    An empty `part` leaves groups as they are. Raises ValueError if rewards lack the number.
    """
    if not part:
        return group_N
    if part not in scores.parts:
        raise ValueError(
            f"algorithm.role_part={part}: the reward function gives no such number, only"
            f" {', '.join(sorted(scores.parts)) or 'none'}"
        )
    pairs_N2 = torch.stack([group_N.double(), torch.tensor(scores.parts[part]).double()], dim=1)
    return pairs_N2.unique(dim=0, return_inverse=True)[1]


@dataclass(frozen=True)
class SampleShapes:
    """Group and length of each sample, and whether a bound cut it off.

    group_N, lens_N   int64; equal numbers are one group
    is_cut_off_N      bool
    """

    group_N: Tensor
    lens_N: Tensor
    is_cut_off_N: Tensor

    @staticmethod
    def of(samples: Sequence[AnySample]) -> "SampleShapes":
        return SampleShapes(
            torch.tensor([sample.prompt.index for sample in samples], dtype=torch.int64),
            torch.tensor([sample.response_len for sample in samples], dtype=torch.int64),
            torch.tensor([sample.finish_reason in CUT_OFF for sample in samples]),
        )


def _restored(
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


def steered(coef: float, kl: float, num_samples: int, config: KLConfig) -> float:
    """Return the coefficient after a step of `num_samples` with this KL; arXiv:1909.08593, section
    2.2.
    """
    if not config.target:
        return coef
    error = min(max(kl / config.target - 1, -0.2), 0.2)
    return coef * (1 + error * num_samples / config.horizon)


def kl_of_tokens(batch: TrainBatch, config: AlgorithmConfig) -> Tensor:
    """Return KL(old || reference) of each trained token, float64 [R], in their order.

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
    return KL_ESTIMATORS[config.kl.estimator](log_ratio_T)[trained_in_order(batch)]


def _trained(batch: TrainBatch, values_T: Tensor | None) -> Tensor | None:
    return None if values_T is None else values_T[trained_in_order(batch)]


def _energy(batch: TrainBatch) -> Tensor | None:
    """Return 1 - 2 p + sum(p^2) of each trained token; None if the sums are unknown."""
    if batch.sum_squares_T is None or batch.old_logprobs_T is None:
        return None
    energy_T = 1 - 2 * batch.old_logprobs_T.double().exp() + batch.sum_squares_T.double()
    return energy_T[trained_in_order(batch)]
