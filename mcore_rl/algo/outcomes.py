"""Holds the rewards and log-probs from which advantages are computed, and sums over groups.

Axes: N samples, R response tokens of all samples laid end to end, G groups, M tokens of the longest
response.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Outcomes:
    """N samples in any order; a sample may have no response token.

    rewards_N         reward of each whole response; computations use float64
    group_N           one id per sample, equal for the samples of one prompt
    lens_N            int64, response tokens
    token_rewards_R   float64, additional reward of each token, such as a KL penalty; None means
                      zeros
    parts             (weight, values_N) of each part of the reward, if it has parts
    greedy_N          reward of the greedy response to the same prompt
    energy_R          squared norm of the gradient of each token's log-prob by the logits
    values_R          the critic's value of the state in which each token was drawn
    logprobs_R, ref_logprobs_R, teacher_logprobs_R
                      log-probs by the policy that the step starts from, the reference and the
                      teacher
    by_sample         advantages are wanted by sample, not by token
    """

    rewards_N: Tensor
    group_N: Tensor
    lens_N: Tensor
    token_rewards_R: Tensor | None = None
    parts: Sequence[tuple[float, Tensor]] = ()
    greedy_N: Tensor | None = None
    energy_R: Tensor | None = None
    values_R: Tensor | None = None
    logprobs_R: Tensor | None = None
    ref_logprobs_R: Tensor | None = None
    teacher_logprobs_R: Tensor | None = None
    by_sample: bool = False

    def __post_init__(self) -> None:
        shapes = [tuple(t.shape) for t in (self.rewards_N, self.group_N, self.lens_N)]
        if len(set(shapes)) != 1 or self.rewards_N.ndim != 1:
            raise ValueError(
                f"rewards, groups and lens must all be [N], are {', '.join(map(str, shapes))}"
            )
        if not self.rewards_N.isfinite().all():
            bad = self.rewards_N.isfinite().logical_not().nonzero()[:, 0].tolist()
            raise ValueError(f"rewards of samples {bad[:8]} are not finite")
        num_tokens = int(self.lens_N.sum())
        if self.token_rewards_R is not None and self.token_rewards_R.shape != (num_tokens,):
            raise ValueError(
                f"token rewards {tuple(self.token_rewards_R.shape)} for {num_tokens} tokens"
            )

    @property
    def scores_N(self) -> Tensor:
        """float64 [N], the reward of each sample plus the rewards of its tokens."""
        if self.token_rewards_R is None:
            return self.rewards_N.double()
        return self.rewards_N.double() + self.padded(self.token_rewards_R).sum(1)

    def spread(self, values_N: Tensor) -> Tensor:
        """float32 [R], the value of each sample at all of its tokens; [N] with `by_sample`."""
        if self.by_sample:
            return values_N.float()
        return values_N.repeat_interleave(self.lens_N).float()

    @property
    def is_token_NM(self) -> Tensor:
        """bool [N, M], True at the tokens of each sample; M is the length of the longest."""
        return torch.arange(int(self.lens_N.amax())) < self.lens_N[:, None]

    def padded(self, values_R: Tensor) -> Tensor:
        """float64 [N, M], 0 where there is no token."""
        is_token_NM = self.is_token_NM
        return torch.zeros(is_token_NM.shape, dtype=torch.float64).masked_scatter_(
            is_token_NM, values_R.double()
        )

    @property
    def rewards_NM(self) -> Tensor:
        """float64 [N, M]; the reward of the whole response comes with its last token."""
        rewards_NM = torch.zeros(self.is_token_NM.shape, dtype=torch.float64)
        if self.token_rewards_R is not None:
            rewards_NM = self.padded(self.token_rewards_R)
        has_tokens_N = self.lens_N > 0
        last_N = (self.lens_N - 1).clamp(min=0)
        rewards_NM[has_tokens_N, last_N[has_tokens_N]] += self.rewards_N.double()[has_tokens_N]
        return rewards_NM

    def rewards_to_go(self, gamma: float) -> Tensor:
        """float64 [R]: sum over the sample's later tokens t' >= t of gamma^(t' - t) r_t'."""
        rewards_NM = self.rewards_NM
        for t in reversed(range(rewards_NM.shape[1] - 1)):
            rewards_NM[:, t] += gamma * rewards_NM[:, t + 1]
        return rewards_NM[self.is_token_NM]


@dataclass(frozen=True)
class Groups:
    """Samples by group. index_N: the group of each sample, counted from 0; sizes_G: float64, their
    sizes.
    """

    index_N: Tensor
    sizes_G: Tensor

    @staticmethod
    def of(group_N: Tensor) -> "Groups":
        """Group samples with equal ids."""
        _, index_N, sizes_G = group_N.unique(return_inverse=True, return_counts=True)
        return Groups(index_N, sizes_G.double())

    @property
    def sizes_N(self) -> Tensor:
        return self.sizes_G[self.index_N]

    def sum(self, values_N: Tensor) -> Tensor:
        """At each sample, the sum over its group; values_N is float64 [N] or [N, ...]."""
        sums_G = self.sizes_G.new_zeros(len(self.sizes_G), *values_N.shape[1:])
        return sums_G.index_add_(0, self.index_N, values_N)[self.index_N]

    def centered(self, values_N: Tensor, weights_N: Tensor | None = None) -> Tensor:
        """values - (weighted) mean of the group; float64 [N].

        Equal values give exactly 0, not rounding errors that a division by their standard deviation
        would blow up.
        """
        weights_N = torch.ones_like(values_N) if weights_N is None else weights_N
        lowest_G = torch.full_like(self.sizes_G, torch.inf)
        lowest_G = lowest_G.scatter_reduce(0, self.index_N, values_N, "amin")
        above_N = values_N - lowest_G[self.index_N]
        total_N = self.sum(weights_N)
        return above_N - self.sum(weights_N * above_N) / torch.where(total_N > 0, total_N, 1.0)

    def std(self, centered_N: Tensor) -> Tensor:
        """At each sample, the standard deviation (divided by G - 1) of its group; 0 in a group of
        one.
        """
        return (self.sum(centered_N.square()) / (self.sizes_N - 1).clamp(min=1)).sqrt()
