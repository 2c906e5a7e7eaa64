"""Makes the Outcomes of samples from their scores, and from the tokens of their batch.

Axes: N samples, T tokens of the batch, R trained tokens in the order in which they were sampled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mcore_rl.algo.correction import old_policy, weights_of_batch
from mcore_rl.algo.diagnostics import log_ratio
from mcore_rl.algo.kl import KL_ESTIMATORS
from mcore_rl.algo.outcomes import Outcomes
from mcore_rl.algo.sequences import order_trained_tokens
from mcore_rl.config import AlgorithmConfig, CorrectionConfig
from mcore_rl.types import CUT_OFF, StoredSample, TrainBatch
from mcore_rl.types.scores import Scores


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
    def from_samples(samples: Sequence[StoredSample]) -> "SampleShapes":
        return SampleShapes(
            torch.tensor([sample.prompt.index for sample in samples], dtype=torch.int64),
            torch.tensor([sample.response_len for sample in samples], dtype=torch.int64),
            torch.tensor([sample.finish_reason in CUT_OFF for sample in samples]),
        )


def outcomes_of_scores(
    scores: Scores,
    shapes: SampleShapes,
    config: AlgorithmConfig,
    part_weights: Mapping[str, float],
) -> Outcomes:
    """Return the fields that need no token. Raises ValueError if rewards lack a number."""
    parts = [(weight, torch.tensor(scores.parts[name])) for name, weight in part_weights.items()]
    greedy_N = torch.tensor(scores.greedy_N, dtype=torch.float64) if scores.greedy_N else None
    return Outcomes(
        torch.tensor(scores.rewards_N, dtype=torch.float64),
        groups_by_role(shapes.group_N, scores, config.role_part),
        shapes.lens_N,
        parts=parts,
        greedy_N=greedy_N,
    )


def with_tokens(outcomes: Outcomes, batch: TrainBatch, config: AlgorithmConfig) -> Outcomes:
    """Add the fields of tokens that the batch has, but for rewards and last values."""
    return replace(
        outcomes,
        energy_R=_energy(batch, config.correction),
        logprobs_R=_take_trained(batch, old_policy(batch, config)),
        ref_logprobs_R=_take_trained(batch, batch.ref_logprobs_T),
        teacher_logprobs_R=_take_trained(batch, batch.teacher_logprobs_T),
        values_R=_take_trained(batch, batch.values_T),
    )


def with_turn_rewards(outcomes: Outcomes, batch: TrainBatch, weight: float) -> Outcomes:
    """Add to the tokens' rewards `weight` times those of the turns of episodes, if there are any.

    They come with the last tokens of the turns; the rest of the episode's reward comes with its
    last token.
    """
    turn_rewards_R = _take_trained(batch, batch.turn_rewards_T)
    if turn_rewards_R is None:
        return outcomes
    turn_rewards_R = weight * turn_rewards_R.double()
    token_rewards_R = turn_rewards_R
    if outcomes.token_rewards_R is not None:
        token_rewards_R = turn_rewards_R + outcomes.token_rewards_R
    rest_N = outcomes.rewards_N - outcomes.sums_N(turn_rewards_R)
    return replace(outcomes, rewards_N=rest_N, token_rewards_R=token_rewards_R)


def with_last_values(outcomes: Outcomes, batch: TrainBatch, shapes: SampleShapes) -> Outcomes:
    """Add the critic's values of the states after the ends of samples that were cut off."""
    if batch.values_T is None:
        return outcomes
    rows = range(len(batch.lens_N))
    last_rows = dict(zip(batch.sample_N or rows, rows, strict=True))
    first_T = torch.tensor((0, *batch.lens_N)).cumsum(0)[list(last_rows.values())]
    # Samples without a token have no row; `last_rows` counts the others.
    with_rows = shapes.lens_N.nonzero()[:, 0][list(last_rows)]
    last_values_N = torch.zeros(len(shapes.lens_N))
    last_values_N[with_rows] = batch.values_T[first_T]
    return replace(outcomes, last_values_N=last_values_N * shapes.is_cut_off_N)


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
    return KL_ESTIMATORS[config.kl.estimator](log_ratio_T)[order_trained_tokens(batch)]


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


def place_at_tokens(batch: TrainBatch, values_R: Tensor, config: AlgorithmConfig) -> Tensor:
    """Return [T], the values at the trained tokens and 0 at others.

    Raises ValueError if they are not one per trained token: a user's advantage may return another
    shape or dtype.
    """
    trained_R = order_trained_tokens(batch)
    num_trained = len(trained_R)
    if values_R.shape != (num_trained,):
        raise ValueError(
            f"algorithm.advantage={config.advantage} returned shape {tuple(values_R.shape)}"
            f" for {num_trained} response tokens: expected one number per token"
        )
    return values_R.new_zeros(len(batch.loss_mask_T)).index_copy_(0, trained_R, values_R)


def _take_trained(batch: TrainBatch, values_T: Tensor | None) -> Tensor | None:
    return None if values_T is None else values_T[order_trained_tokens(batch)]


def _energy(batch: TrainBatch, correction: CorrectionConfig) -> Tensor | None:
    """Return 1 - 2 p + sum(p^2) of each trained token, times the square of its importance weight,
    which scales its gradient; None if the sums are unknown.
    """
    if batch.sum_squares_T is None or batch.old_logprobs_T is None:
        return None
    energy_T = 1 - 2 * batch.old_logprobs_T.double().exp() + batch.sum_squares_T.double()
    if correction.is_weighted:
        energy_T *= weights_of_batch(batch, correction).square()
    return energy_T[order_trained_tokens(batch)]
